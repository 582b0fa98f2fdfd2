"""The Tinker calls in this process: the official client's names on a service in a thread, without a server.

convert          the official types -> messages, and back
errors           the official exceptions
futures          results of calls: waited for, or awaited in any event loop
host             the event loop's thread, the service and its backend in it; shared by clients
progress         a line that tells what takes long
custom_loss      a loss computed here
*_client         what users call
client_futures   futures of clients
deprecated       the calls that the official package is to lose
"""
