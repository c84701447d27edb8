"""What a checkpoint says of itself in ``run.json``, and what must match to load it. No torch."""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.training.run_config import RunConfig

DESCRIPTION = "run.json"
# Of the model's configuration, what says how it is computed or trained and not what it is.
_NOT_THE_MODEL = {"hidden_dropout", "init_method_std", "seq_length"}


@dataclass
class TrainingState:
    """Where a run stands.

    Attributes:
        iteration: finished iterations.
        consumed_samples: sequences trained on.
        tokens: tokens trained on.
        skipped_steps: iterations whose update was skipped.
    """

    iteration: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Description:
    """Everything of a checkpoint that is no tensor.

    There is no state of random generators: initial weights, data order and dropout depend on the
    seed, names and positions alone.

    Attributes:
        state: where the run stands.
        optimizer_steps: updates done, skipped ones excluded.
        scheduler: of the learning rate.
        model: what the model is, flat, by name.
        data: what decides on the order of samples, flat, by name.
        order: digest of the samples that were trained on; empty on ranks that do not write.
        tokenizer: what tells it from others (data/tokenizers.py); empty if it is not known.
        configuration: of the run that wrote it, its layout included.
        plan_digest: of that run's pipeline plan.
    """

    state: TrainingState
    optimizer_steps: int
    scheduler: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    order: str
    tokenizer: dict[str, Any]
    configuration: dict[str, Any]
    plan_digest: str

    def write(self, folder: Path) -> None:
        """Into a checkpoint's folder."""
        (folder / DESCRIPTION).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Description":
        """Of a checkpoint's folder.

        Raises:
            InputError: it has none, or none of ours.
        """
        try:
            content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            return cls(**content | {"state": TrainingState(**content["state"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{folder}: {DESCRIPTION} cannot be read ({error})") from error


def describe(
    config: RunConfig,
    plan: dict[str, Any],
    state: TrainingState,
    optimizer_steps: int,
    scheduler: dict[str, Any],
    order: str,
    tokenizer: dict[str, Any],
) -> Description:
    """The description of a run's checkpoint."""
    digest = sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
    return Description(
        # A copy: the run goes on while this is written.
        replace(state),
        optimizer_steps,
        scheduler,
        model_identity(config.model),
        data_identity(config),
        order,
        tokenizer,
        _plain(asdict(config)),
        digest,
    )


def model_identity(config: ModelConfig) -> dict[str, Any]:
    """What the run that loads a checkpoint must have in common with it."""
    model = asdict(config)
    attn_res = model.pop("attn_res")
    # Who computes it is no part of the model; and of a learned scalar only the presence shapes it.
    del attn_res["operator"]
    attn_res["recency_bias"] = attn_res["recency_bias"] is not None
    if attn_res["mode"] == "baseline":
        # It has no blocks, whatever their size would be.
        attn_res["block_size"] = None
    kept = {name: value for name, value in model.items() if name not in _NOT_THE_MODEL}
    return _plain(kept | {f"attn_res.{name}": value for name, value in attn_res.items()})


def data_identity(config: RunConfig) -> dict[str, Any]:
    """What decides on the order of samples: a resumed run skips none and repeats none."""
    return _plain(
        {
            "seed": config.loop.seed,
            "seq_length": config.model.seq_length,
            "split": config.data.split,
        }
    )


def check_same(kind: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise InputError that names the fields that differ, and both values."""
    different = [
        f"the checkpoint has {kind}.{name} = {saved.get(name)}, the run has {own.get(name)}"
        for name in sorted(saved.keys() | own.keys())
        if saved.get(name) != own.get(name)
    ]
    if different:
        raise InputError(f"{'; '.join(different)}; resume with the {kind} that was saved")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(values, default=str))
