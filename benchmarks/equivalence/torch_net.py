"""The model of `problem` for the tools built on PyTorch, with the same first weights."""

import problem
import torch


def net() -> torch.nn.Sequential:
    norm = torch.nn.LayerNorm(problem.HIDDEN, eps=problem.EPSILON)
    if problem.NORM == "batch":
        norm = torch.nn.BatchNorm1d(problem.HIDDEN, eps=problem.EPSILON, momentum=1 - problem.NORM_MOMENTUM)
    model = torch.nn.Sequential(
        torch.nn.Linear(problem.FEATURES, problem.HIDDEN, bias=False),
        norm,
        torch.nn.Tanh(),
        torch.nn.Linear(problem.HIDDEN, problem.CLASSES),
    )
    with torch.no_grad():
        for ours, first in zip(_tensors(model), problem.first_weights(), strict=True):
            ours.copy_(torch.from_numpy(first))
    return model


def _tensors(model) -> list[torch.Tensor]:
    """Returns the tensors of `problem.NAMES`, kernels as [inputs, outputs]."""
    norm = model[1]
    statistics = [norm.running_mean, norm.running_var] if problem.STATISTICS else []
    return [model[0].weight.T, norm.weight, norm.bias, *statistics, model[3].weight.T, model[3].bias]


def weights(model) -> list:
    return [t.detach().cpu().numpy() for t in _tensors(model)]


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, problem.LEARNING_RATE, momentum=problem.MOMENTUM)


def dataset() -> torch.utils.data.TensorDataset:
    x, y = problem.data()
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
