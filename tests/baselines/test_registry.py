"""The list of baselines."""

import pytest

from branchout.baselines.registry import method_named, methods
from branchout.errors import BranchoutError

KNOWN = [
    "pretrained",
    "confidence-routing",
    "learned-routing",
    "oracle-routing",
    "featcat-rt",
    "logitcat-rt",
    "logitcat-ft",
    "logitcat-average",
    "logitcat-max",
    "ncm",
    "ncm-all",
    "ranpac",
    "ranpac-all",
    "fecam",
    "fecam-all",
    "slca",
    "slca-all",
    "aper",
    "aper-all",
]


def test_methods_on_frozen_features_are_listed_in_the_tables_order() -> None:
    assert [name for name in methods() if name in KNOWN] == KNOWN


def test_every_method_says_what_it_builds_on() -> None:
    assert {method.on for method in methods().values()} <= {"features", "network", "base"}
    assert all(method.name == name for name, method in methods().items())


def test_whoever_sees_all_images_is_marked() -> None:
    assert all(methods()[name].oracle for name in KNOWN if name.endswith("-all") or name.startswith("oracle"))
    assert not any(methods()[name].oracle for name in ("ncm", "learned-routing", "logitcat-ft"))


def test_hard_decisions_have_no_dial() -> None:
    assert [name for name in KNOWN if not methods()[name].dial] == KNOWN[:4]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    assert method_named("ncm").label
    with pytest.raises(BranchoutError, match=r"no method is called 'nmc'.*confidence-routing"):
        method_named("nmc")
