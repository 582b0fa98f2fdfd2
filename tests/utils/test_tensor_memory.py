import gc

import torch

from rl.utils.tensor_memory import memory_of


def test_the_array_is_the_tensors_memory_from_its_first_element_on():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert memory_of(tensor, dtype="f4").tolist() == list(range(12))
    column = tensor[1:, 1]
    array = memory_of(column, dtype="f4", num_elements=5)
    assert array.tolist() == [5, 6, 7, 8, 9]
    array[4] = -1
    assert tensor[2, 1] == -1


def test_bfloat16_is_read_as_bits_and_an_empty_tensor_as_an_empty_array():
    bits = memory_of(torch.tensor([1.0, -2.0], dtype=torch.bfloat16), dtype="u2")
    assert (bits.itemsize, bits.tolist()) == (2, [0x3F80, 0xC000])
    assert memory_of(torch.empty(0), dtype="f4").shape == (0,)


def test_the_array_keeps_its_tensor_alive():
    arrays = [memory_of(torch.full((1000,), float(i)), dtype="f4") for i in range(50)]
    gc.collect()
    assert all((array == i).all() for i, array in enumerate(arrays))
