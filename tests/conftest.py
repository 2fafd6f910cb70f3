"""What all tests share: a hypothesis profile, one thread, a cache of their own, and a few small trained models."""

from collections.abc import Iterator

import pytest
import torch
from browsing import Browser, opened_browser
from helpers import BASE, LATER, NEW, drawn, exemplars
from hypothesis import settings

from branchout import api
from branchout.data.samples import Samples
from branchout.training.optimisation import Optimisation

# A busy machine is no failure, and a failure repeats.
settings.register_profile("branchout", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("branchout")


LONGEST = (
    "test_demo",
    "test_inbox_page",
    "test_appearance",
    "test_processes",
    "test_export",
    "test_whole_path",
    "test_runner",
)
"""Files that take longest. They come first: at the end one process would run them while the others have nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny networks are slower on many threads, and where bits are compared the number of threads must be the same."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from, or left in, the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser, for as long as one file of tests needs it."""
    with opened_browser() as found:
        yield found


@pytest.fixture(scope="session")
def pictures() -> tuple[Samples, Samples]:
    return drawn(20, 8)


@pytest.fixture(scope="session")
def train(pictures: tuple[Samples, Samples]) -> Samples:
    """20 images of each of 14 characters."""
    return pictures[0]


@pytest.fixture(scope="session")
def val(pictures: tuple[Samples, Samples]) -> Samples:
    """8 other images of each."""
    return pictures[1]


@pytest.fixture(scope="session")
def base(train: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    """A base model of 8 characters, saved. It is far from perfect, so there is something to gain and to lose."""
    model = api.pretrain(
        train.of_classes(BASE),
        width=8,
        size=32,
        kind="glyph",
        optimisation=Optimisation(epochs=30, lr=0.03, batch=32, nesterov=True, schedule="cosine"),
        device=torch.device("cpu"),
    )
    return model.save(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def extended(base: api.Model, train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory) -> api.Model:
    """The base with three more characters, saved; chosen on images given for it."""
    return base.extend(
        train.of_classes(NEW),
        memory=exemplars(train),
        val=val.of_classes([*BASE, *NEW]),
        out=tmp_path_factory.mktemp("models") / "v2",
        epochs=15,
    )


@pytest.fixture(scope="session")
def extended_twice(
    extended: api.Model, train: Samples, val: Samples, tmp_path_factory: pytest.TempPathFactory
) -> api.Model:
    """The same with three more, one old one of the base and one of the first step."""
    return extended.extend(
        train.of_classes([*LATER, BASE[0], NEW[0]]),
        memory=exemplars(train, [*BASE, *NEW]),
        val=val,
        out=tmp_path_factory.mktemp("models") / "v3",
        epochs=4,
    )
