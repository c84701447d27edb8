"""The flags of pretrain_attnres.py that decide what is computed, and on which ranks. No torch.

Names are Megatron's where Megatron has the flag.
"""

import argparse
from collections.abc import Sequence
from typing import get_args

from megatron_attnres.commands import CommandParser
from megatron_attnres.data.configuration import TokenizerType
from megatron_attnres.depth_attention.names import OperatorName
from megatron_attnres.model.configuration import NAMED_SIZES
from megatron_attnres.training.run_arguments import add_run_arguments


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and, below them, the keys of ``--config``.

    Raises:
        InputError: an unknown flag or key, a value of the wrong type, a file that is no YAML.
    """
    parser = CommandParser(
        "Pretrain a GPT with Attention Residuals.",
        epilog="Lengths are in tokens, intervals in iterations, batch sizes in sequences.",
    )
    for add_group in (
        _add_model,
        _add_attention_residuals,
        _add_parallelism,
        _add_pipeline_payload,
        _add_data,
        _add_training,
        _add_optimizer,
    ):
        add_group(parser)
    add_run_arguments(parser)
    return parser.parse_args(argv)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--model-size",
        choices=sorted(NAMED_SIZES),
        help="sizes by name; the six flags below and --rotary-base override single ones",
    )
    add("--num-layers", type=int, help="Transformer layers (two sublayers each)")
    add("--hidden-size", type=int, help="width h of the residual stream")
    add("--ffn-hidden-size", type=int, help="width of the SwiGLU MLP")
    add("--num-attention-heads", type=int, help="query heads")
    add("--num-query-groups", type=int, help="key and value heads")
    add("--kv-channels", type=int, help="width of one head; hidden size / heads if not given")
    add("--seq-length", type=int, default=1024, help="tokens per sample")
    add("--rotary-base", type=float, help="base of the rotary embedding")
    add("--norm-epsilon", type=float, default=1e-6, help="epsilon of all norms")
    add("--init-method-std", type=float, default=0.02, help="deviation of initial weights")
    add(
        "--hidden-dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="share of the embedding's and every sublayer's outputs dropped in training, the same "
        "on any layout",
    )
    add(
        "--untie-embeddings-and-output-weights",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="give the output layer weights of its own",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="pad the vocabulary to a multiple of this, whatever the layout",
    )


def _add_attention_residuals(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention residuals")
    add = group.add_argument
    add(
        "--attn-res-mode",
        choices=["baseline", "block", "full"],
        default="block",
        help="baseline: standard residuals; block: attend over block summaries; full: over every "
        "sublayer's output",
    )
    add("--attn-res-num-blocks", type=int, metavar="N", help="number of blocks (block mode)")
    add(
        "--attn-res-block-size",
        type=int,
        metavar="S",
        help="sublayers per block (block mode; 8 blocks if neither is given)",
    )
    add(
        "--attn-res-recency-bias",
        type=float,
        metavar="FLOAT",
        help="start of a learned bias on the newest source; no bias if not given",
    )
    add(
        "--attn-res-sources",
        choices=["delta", "cumulative"],
        default="delta",
        help="delta: a block's own sum (paper); cumulative: the running hidden state",
    )
    add(
        "--attn-res-operator",
        choices=get_args(OperatorName),
        default="auto",
        help="two-phase: ours; fused: fla-core's, CUDA only; plain: slow, for looking for faults; "
        "auto: fused where it can do the read, else two-phase",
    )


def _add_pipeline_payload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline payload")
    add = group.add_argument
    add(
        "--attn-res-pipeline",
        choices=["naive", "cached"],
        default="cached",
        help="naive: a hop carries every source; cached: only what the receiving rank lacks",
    )
    add(
        "--attn-res-early-relay",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send received sources on before the chunk computes, on lanes of their own",
    )
    add(
        "--pipeline-layers-per-chunk",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="layers of each of the P x V chunks in model order, where they are not equal; 0 for "
        "an embedding-only first or head-only last chunk",
    )


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, metavar="TP", help="ranks per layer")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="P", help="stages")
    add(
        "--virtual-pipeline-model-parallel-size",
        type=int,
        default=1,
        metavar="V",
        help="chunks per stage; above 1 runs the interleaved schedule",
    )
    add(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        metavar="N",
        help="contiguous micro-batches of one virtual stage; P if not given",
    )
    add(
        "--overlap-p2p-communication",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="interleaved schedule: post receives ahead of compute",
    )
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="shard activations along the sequence between tensor-parallel regions",
    )
    add(
        "--recompute-granularity",
        choices=["none", "selective", "full"],
        default="none",
        help="activations computed again in backward: none, core attention, whole layers",
    )
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N ranks on this machine; not needed under torchrun",
    )
    add("--distributed-backend", choices=["nccl", "gloo"], help="nccl where CUDA exists, else gloo")
    add(
        "--distributed-timeout-minutes",
        type=float,
        default=10.0,
        help="after which a collective or transfer fails instead of hanging",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help=".bin/.idx prefix, several prefixes, or weights and prefixes in turn",
    )
    add("--split", default="969,30,1", help="shares of train, validation and test")
    add("--data-cache-path", metavar="DIR", help="folder of the shuffled index")
    add("--num-workers", type=int, default=0, help="processes that read ahead, per rank")
    add(
        "--tokenizer-type",
        choices=get_args(TokenizerType),
        default="SentencePieceTokenizer",
        help="what made the token ids; NullTokenizer needs --vocab-size only",
    )
    add("--tokenizer-model", metavar="PATH", help="SentencePiece model or Hugging Face folder")
    add("--vocab-size", type=int, help="for NullTokenizer")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--train-iters", type=int, help="iterations in all")
    add("--micro-batch-size", type=int, default=1, help="sequences per rank and micro-batch")
    add("--global-batch-size", type=int, help="sequences per iteration over all ranks")
    add("--seed", type=int, default=1234, help="of weights, data order and dropout")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 keeps fp32 masters")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer (AdamW)")
    add = group.add_argument
    add("--lr", type=float, default=3e-4, help="highest learning rate")
    add("--min-lr", type=float, default=0.0, help="lowest learning rate after decay")
    add(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "WSD"],
        default="cosine",
        help="course after warm-up; WSD stays at --lr and decays at the end",
    )
    add("--lr-warmup-iters", type=int, default=0, help="linear warm-up")
    add("--lr-decay-iters", type=int, help="where decay ends; --train-iters if not given")
    add("--lr-wsd-decay-iters", type=int, help="last iterations that decay under WSD")
    add(
        "--lr-wsd-decay-style",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
        default="minus_sqrt",
        help="course of the last iterations under WSD",
    )
    add("--weight-decay", type=float, default=0.1, help="none on norms, biases, pseudo-queries")
    add("--adam-beta1", type=float, default=0.9, help="decay of the mean gradient")
    add("--adam-beta2", type=float, default=0.95, help="decay of the mean squared gradient")
    add("--adam-eps", type=float, default=1e-8, help="added to the root of the latter")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0 does not clip")
    add("--zero-stage", type=int, choices=[0, 1], default=1, help="1 shards optimizer state")
    add(
        "--zero-cpu-offload",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep optimizer state in host memory (accelerator hosts)",
    )
