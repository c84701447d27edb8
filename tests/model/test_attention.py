import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_attnres.model.attention import SelfAttention, cached_attention, causal_attention
from megatron_attnres.model.key_value_cache import KeyValueCache
from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.model.rotary import rotary_tables
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import GROUP_TIMEOUT, run_ranks
from tests.layouts import small_model


def heads(tokens=6, batch=2, queries=4, groups=2, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, batch, count, width, generator=generator, dtype=torch.float64).to(dtype)
        for count in (queries, groups, groups)
    ]


def written_out(query, key, value):
    """Causal attention with the [s, s] matrix that the model must not make."""
    share = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(share, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_formula(groups):
    ours = [tensor.requires_grad_() for tensor in heads(groups=groups)]
    plain = [tensor.detach().clone().requires_grad_() for tensor in ours]
    context, expected = causal_attention(*ours), written_out(*plain)
    torch.testing.assert_close(context, expected)
    torch.manual_seed(0)
    gradient = torch.randn_like(context)
    context.backward(gradient)
    expected.backward(gradient)
    for tensor, same in zip(ours, plain, strict=True):
        torch.testing.assert_close(tensor.grad, same.grad)


def test_grouped_queries_are_those_of_expanded_heads():
    query, key, value = heads(queries=6, groups=2)
    expanded = [tensor.repeat_interleave(3, dim=2) for tensor in (key, value)]
    torch.testing.assert_close(
        causal_attention(query, key, value), causal_attention(query, *expanded)
    )


@pytest.mark.parametrize("changed", [0, 1, 3, 5])
def test_a_token_reaches_itself_and_later_ones_only(changed):
    query, key, value = heads()
    before = causal_attention(query, key, value)
    for tensor in (query, key, value):
        tensor[changed] += 1
    after = causal_attention(query, key, value)
    assert torch.equal(after[:changed], before[:changed])
    assert not torch.isclose(after[changed:], before[changed:]).all(-1).any()


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_tokens_by_tokens_is_made_or_kept(dtype):
    tokens = 512
    inputs = [tensor.requires_grad_() for tensor in heads(tokens, 1, width=16, dtype=dtype)]
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with _LargestTensor() as largest:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            context = causal_attention(*inputs)
        context.backward(torch.ones_like(context))
    assert kept
    assert max(kept) < tokens * tokens
    assert 0 < largest.elements < tokens * tokens


def _self_attention_job():
    model = small_model()
    layout = ParallelLayout()
    groups = initialize_groups(layout, GROUP_TIMEOUT).collection
    config = megatron_config(model, layout, torch.float64, 1, overlap_p2p=False)
    plain, recomputing = (SelfAttention(config, groups, recompute) for recompute in (False, True))
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    recomputing.load_state_dict(plain.state_dict())
    rotary = rotary_tables(
        model.seq_length, model.kv_channels, 10_000.0, torch.float64, torch.device("cpu")
    )
    hidden = torch.randn(model.seq_length, 2, model.hidden_size, dtype=torch.float64)

    def run(attention, hidden):
        hidden = hidden.clone().requires_grad_()
        output = attention(hidden, rotary)
        output.square().sum().backward()
        gradients = [hidden.grad, *(parameter.grad for parameter in attention.parameters())]
        attention.zero_grad()
        return output.detach(), gradients

    changed = hidden.clone()
    changed[5] += 1
    return run(plain, hidden), run(recomputing, hidden), run(plain, changed)


def test_self_attention_is_causal_and_exact_under_recomputation():
    ((plain, recomputed, changed),) = run_ranks(_self_attention_job, 1)
    assert torch.equal(plain[0], recomputed[0])
    assert len(plain[1]) == len(recomputed[1]) == 5
    for gradient, again in zip(plain[1], recomputed[1], strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, again, rtol=1e-13, atol=1e-13)
    assert torch.equal(changed[0][:5], plain[0][:5])
    assert not torch.isclose(changed[0][5:], plain[0][5:]).all(-1).any()


def new_cache(max_length, batch=2, groups=2, width=8, dtype=torch.float64):
    return KeyValueCache(range(1), batch, max_length, groups, width, dtype, torch.device("cpu"))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("pieces", [(6,), (4, 1, 1), (2, 3, 1), (1, 1, 4), (1, 5)])
def test_cached_attention_in_pieces_is_that_of_the_whole_sequence(pieces, groups, batch):
    whole = heads(batch=batch, groups=groups)
    cache = new_cache(8, batch, groups)
    contexts = []
    for piece in zip(*(tensor.split(pieces) for tensor in whole), strict=True):
        contexts.append(cached_attention(*piece, cache.layer(0)))
        cache.advance(len(piece[0]))
    torch.testing.assert_close(torch.cat(contexts), causal_attention(*whole))


class _Operations(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_one_token_costs_two_copies_and_one_kernel():
    query, key, value = heads(7)
    cache = new_cache(8)
    with torch.no_grad():
        cached_attention(query[:6], key[:6], value[:6], cache.layer(0))
        cache.advance(6)
        with _Operations() as operations:
            cached_attention(query[6:], key[6:], value[6:], cache.layer(0))
    views = {"slice", "permute", "view"}
    assert [name for name in operations.names if name not in views] == [
        "copy_",
        "copy_",
        "_scaled_dot_product_flash_attention_for_cpu",
    ]


def _cached_job(tensor_ranks, pieces):
    model = small_model(seq_length=10)
    layout = ParallelLayout(tensor=tensor_ranks)
    groups = initialize_groups(layout, GROUP_TIMEOUT).collection
    config = megatron_config(model, layout, torch.float64, 1, overlap_p2p=False)
    attention = SelfAttention(config, groups, recompute_core=False)
    torch.manual_seed(groups.tp.rank())
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    rotary = rotary_tables(
        model.seq_length, model.kv_channels, 10_000.0, torch.float64, torch.device("cpu")
    )
    torch.manual_seed(0)
    hidden = torch.randn(model.seq_length, 2, model.hidden_size, dtype=torch.float64)
    with torch.inference_mode():
        whole = attention(hidden, rotary)
        shorter = attention(hidden[:4], rotary)
        cache = new_cache(model.seq_length + 1, 2, attention.groups, model.kv_channels)
        outputs = []
        for piece in hidden.split(pieces):
            outputs.append(attention(piece, rotary, cache.layer(0)))
            cache.advance(len(piece))
        try:
            attention(hidden[:1], rotary, cache.layer(0))
            error = ""
        except ValueError as raised:
            error = str(raised)
    return whole, shorter, torch.cat(outputs), error


@pytest.mark.parametrize(
    ("tensor_ranks", "pieces"), [(1, (6, 1, 1, 1, 1)), (1, (4, 3, 1, 1, 1)), (2, (4, 3, 1, 1, 1))]
)
def test_self_attention_with_a_cache_gives_the_whole_sequences_outputs(tensor_ranks, pieces):
    for whole, shorter, cached, error in run_ranks(_cached_job, tensor_ranks, tensor_ranks, pieces):
        torch.testing.assert_close(cached, whole, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(shorter, whole[:4], rtol=1e-11, atol=1e-11)
        assert "a sequence of 11 tokens exceeds the 10 positions" in error
        assert "seq_length 11" in error
