"""The list of checks: every one has a name of its own and says what it costs."""

from attnbench.verifying.checks import CHECKS


def test_checks_have_names_of_their_own_and_a_cost():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.cost for check in CHECKS)


def test_only_a_kernel_of_declared_error_or_a_short_examination_is_spared_checks():
    always = {check.name for check in CHECKS if not check.exact and not check.thorough}
    assert always == {
        "one value in all of V",
        "other batch rows and heads",
        "other values in the same memory",
        "LSE",
        "magnitudes",
        "a hidden NaN",
    }
