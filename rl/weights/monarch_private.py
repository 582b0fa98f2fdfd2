"""Private names of Monarch that the weight store uses; apart from those of PyTorch, so that
checksums need no Monarch.
"""

from __future__ import annotations

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

# A call to a dead process raises it; no public module of Monarch exports it.
LostProcessError = SupervisionError
