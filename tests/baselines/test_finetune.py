"""Fine-tuning learns the new and forgets the old, unless exemplars remind it."""

from branchout.baselines import finetune


def test_it_learns_and_forgets(classifier, task, accuracy_of, old_test, new_test) -> None:
    network = finetune.learn(classifier, task)
    assert accuracy_of(network, task, new_test) > 0.8
    assert accuracy_of(network, task, old_test) < 0.3


def test_exemplars_help_it_remember(classifier, task, accuracy_of, old_test, new_test) -> None:
    network = finetune.learn(classifier, task, exemplars=True)
    assert accuracy_of(network, task, new_test) > 0.8
    assert accuracy_of(network, task, old_test) > 0.8
