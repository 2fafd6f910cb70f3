"""What is imported only when something is compiled. Each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys

LARGE = "{'triton', 'sympy', 'torch._inductor'} & set(sys.modules)"


def run(code: str) -> None:
    begin = "import sys\nfrom branchout.cli import deferred_compiler\ndeferred_compiler.import_when_used()\n"
    subprocess.run([sys.executable, "-c", begin + code], check=True)


def test_opening_and_training_a_network_import_no_compiler() -> None:
    run(
        "import branchout.model.bases, branchout.training.loop, timm, torch, torchvision\n"
        "parameter = torch.nn.Parameter(torch.ones(1))\n"
        "optimiser = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)\n"
        "parameter.sum().backward()\n"
        "optimiser.step()\n"
        "optimiser.zero_grad()\n"
        "assert parameter.item() == 0.5\n"
        f"assert not {LARGE}, {LARGE}"
    )


def test_the_compiler_is_there_when_it_is_used() -> None:
    run(
        "import torch\n"
        "optimiser = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)\n"
        "import torch._dynamo.config as config\n"
        "import torch._dynamo.utils as utils\n"
        "import torch._dynamo\n"
        "assert config is torch._dynamo.config is sys.modules['torch._dynamo.config']\n"
        "assert utils is torch._dynamo.utils and utils.__file__ and torch._dynamo.__file__\n"
        "assert config.__spec__.name == 'torch._dynamo.config'\n"
        "optimiser.step()\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "assert double(torch.ones(1)).item() == 2"
    )


def test_an_attribute_of_the_compiler_imports_it() -> None:
    run(
        "import torch\n"
        "assert not torch.compiler.is_compiling()\n"
        "assert type(torch._dynamo).__name__ == 'Deferred'\n"
        "torch._dynamo.reset()\n"
        "import torch._dynamo\n"
        "assert torch._dynamo.__file__\n"
        "assert type(torch._dynamo.utils).__name__ == 'module'"
    )
