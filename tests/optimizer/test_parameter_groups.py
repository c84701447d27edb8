import torch
from torch import nn

from megatron_attnres.optimizer.parameter_groups import parameter_groups, unique_named_parameters


def test_vectors_and_marked_matrices_take_no_decay():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3, bias=False))
    module[2].weight.no_weight_decay = True
    module.bias = nn.Parameter(torch.zeros(()))
    decayed, others = parameter_groups(module.named_parameters(), 0.1)
    assert decayed["params"] == [module[0].weight]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (decayed["wd_mult"], others["wd_mult"]) == (1.0, 0.0)
    assert len(others["params"]) == 5


def test_there_are_two_groups_whatever_the_stage_holds():
    assert [len(g["params"]) for g in parameter_groups(nn.LayerNorm(3).named_parameters(), 0)] == [
        0,
        2,
    ]
    bare = nn.Linear(2, 2, bias=False)
    assert [len(g["params"]) for g in parameter_groups(bare.named_parameters(), 0)] == [1, 0]


def test_a_parameter_shared_between_chunks_appears_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    named = unique_named_parameters([first, second])
    assert [name for name, _ in named] == ["0.weight", "0.bias"]
    assert len(parameter_groups(named + named, 0.1)[0]["params"]) == 1
