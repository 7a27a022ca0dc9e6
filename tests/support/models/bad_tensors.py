"""Tensors that look like rows of integers, and have no row of values that could be read."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that some of these kinds may change
    TENSORS_WITHOUT_A_ROW = (
        torch.tensor([1, 0, 2]).to_sparse(),
        torch.tensor([[1, 0, 2]]).to_sparse_csr(),
        torch.tensor([1, 2], device="meta"),
        torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.tensor([1, 2])]),
        torch.nested.nested_tensor([torch.tensor([1, 2])], layout=torch.jagged),
    )
