import gc

import torch

from rl.utils.tensor_memory import get_memory


def test_array_is_the_memory_of_the_tensor_from_its_first_element_on():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    array = get_memory(tensor[1:, 1], dtype="f4", num_elements=5)
    assert array.tolist() == [5, 6, 7, 8, 9]
    array[4] = -1
    assert tensor[2, 1] == -1
    bits = get_memory(torch.tensor([1.0, -2.0], dtype=torch.bfloat16), dtype="u2")
    assert (bits.itemsize, bits.tolist()) == (2, [0x3F80, 0xC000])
    assert get_memory(torch.empty(0), dtype="f4").shape == (0,)


def test_array_keeps_its_tensor_alive():
    arrays = [get_memory(torch.full((1000,), float(i)), dtype="f4") for i in range(50)]
    gc.collect()
    assert all((array == i).all() for i, array in enumerate(arrays))
