"""The list of baselines."""

from branchout.baselines.registry import baselines

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
    "classifier-alignment",
    "classifier-alignment-all",
    "aper",
    "aper-all",
]


def test_methods_on_frozen_features_are_listed_in_the_tables_order() -> None:
    assert [name for name in baselines() if name in KNOWN] == KNOWN


def test_every_method_says_what_it_builds_on() -> None:
    assert {method.on for method in baselines().values()} <= {"features", "network", "base"}
    assert all(method.name == name for name, method in baselines().items())


def test_whoever_sees_all_images_is_marked() -> None:
    assert all(baselines()[name].oracle for name in KNOWN if name.endswith("-all") or name.startswith("oracle"))
    assert not any(baselines()[name].oracle for name in ("ncm", "learned-routing", "logitcat-ft"))


def test_hard_decisions_have_no_dial() -> None:
    assert [name for name in KNOWN if not baselines()[name].dial] == KNOWN[:4]


def test_what_draws_nothing_is_marked() -> None:
    unseeded = [name for name, method in baselines().items() if not method.seeded]
    assert unseeded == ["pretrained"]  # the branches of methods on features are trained for each seed
