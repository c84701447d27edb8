"""Installs the package; what set-up scripts pin exactly is in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="megatron_attnres",
    version="0.1.0",
    description="Pretraining of Transformers with Attention Residuals across pipeline stages",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["megatron_attnres", "megatron_attnres.*"]),
    package_data={"megatron_attnres.analysis.depth": ["page/*"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "deepspeed>=0.19.8,<0.20",
        "datasets>=3",
        "sentencepiece>=0.2",
        "numpy",
        # Fits of scaling laws.
        "scipy",
        "tqdm",
        "tensorboard",
        "matplotlib",
        # The report of depth weights: a page that needs no network.
        "plotly>=6",
        "PyYAML",
        # .jsonl.zst corpora.
        "zstandard",
        # Hugging Face tokenizers by path, and models to and from Hugging Face.
        "transformers>=4.57",
        "tokenizers",
        "safetensors",
        # How SentencePiece writes its models.
        "protobuf",
        # Megatron-Core's datasets compile a helper where its wheel has none for the platform.
        "pybind11",
        "setuptools",
    ],
    extras_require={
        "test": [
            "pytest",
            "hypothesis",
            "ruff",
            "wandb",
            "lm-eval>=0.4.13,<0.5",
            "gradio>=6.31,<7",
            "playwright",
        ],
        # tools/evaluate.py --tasks: lm-evaluation-harness.
        "eval": ["lm-eval>=0.4.13,<0.5"],
        # tools/app.py: the live page.
        "app": ["gradio>=6.31,<7"],
        # --wandb-project.
        "wandb": ["wandb"],
        # Fused depth attention on CUDA. NVIDIA Apex has no wheel on PyPI (the `apex` there is an
        # unrelated package): README tells how to build it.
        "gpu": ["fla-core>=0.6"],
    },
)
