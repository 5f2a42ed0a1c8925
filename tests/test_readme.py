"""What the pages say is so: their links, their commands, the code they show."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("algorithms/*/README.md")]
MODULES = {"algorithms.lm.train", "algorithms.lm.generate"}
MODULES |= {"algorithms.ppo.train", "algorithms.ppo.play", "algorithms.maml.train"}


def commands():
    for page in PAGES:
        for line in page.read_text().splitlines():
            if match := re.match(r" {4}(python -m .*|make .*)", line):
                # A comment, or an explanation after some space, is no part of the command.
                yield page.name, re.split(r"\s{2,}|#", match[1])[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page} links to {target}"


def test_the_code_shown_is_the_code():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert shown.strip() in (ROOT / "algorithms/lm/lm.py").read_text()
    assert all(f"def {name}(" in shown for name in ("collate", "loss", "predict"))


def test_every_make_target_shown_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    shown = {word for _, c in commands() if c.startswith("make") for word in c.split()[1:]}
    assert {word for word in shown if "=" not in word} <= targets and "demo" in shown


def test_every_option_shown_is_understood():
    """Parsed only: the commands themselves would need a network, a cluster or some time."""
    code = (
        "import sys, tyro; from importlib import import_module; "
        "tyro.cli(import_module(sys.argv[1]).Config, args=sys.argv[2:])"
    )
    for page, command in commands():
        if command.startswith("python"):
            _, _, module, *options = shlex.split(command)
            assert module in MODULES, f"{page}: {command}"
            done = subprocess.run(
                [sys.executable, "-c", code, module, *options], cwd=ROOT, capture_output=True
            )
            assert done.returncode == 0, f"{page}: {command}\n{done.stderr.decode()}"


def test_what_continuous_integration_calls_is_what_everybody_calls():
    assert "\nmake lint types test test-all\n" in (ROOT / ".ci/run").read_text()
