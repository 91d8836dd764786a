"""Policies: which implementation to run, by measurement. Light: nothing here measures, runs or reports.

`attnbench.choosing` makes a policy from run files; `attention(impl="auto")` asks the active policies.
"""

from attnbench.policy.files import load_policy, packaged, policy_text, read_policy, save_policy
from attnbench.policy.policy import (
    SCHEMA,
    Alternative,
    Barred,
    Choice,
    Constraints,
    Covering,
    Crossing,
    Entry,
    Place,
    Policy,
    coverings,
    place_of,
)
from attnbench.policy.prediction import HeldOutCheck, Prediction, TimeModel
from attnbench.policy.regret import Regret, pooled
from attnbench.policy.shapes import REACH, Shape, distance, mask_kind, shape_of
from attnbench.policy.stack import (
    PolicyAnswer,
    active,
    checkpoint_context,
    find,
    forget,
    generation,
    on_miss,
    set_policy,
    use_policy,
)

__all__ = [
    "Alternative", "Barred", "Choice", "Constraints", "Covering", "Crossing", "Entry", "HeldOutCheck", "Place",
    "Policy", "PolicyAnswer", "Prediction", "Regret", "Shape", "TimeModel",
    "REACH", "SCHEMA",
    "active", "checkpoint_context", "coverings", "distance", "find", "forget", "generation", "load_policy", "mask_kind",
    "on_miss", "packaged", "place_of", "policy_text", "pooled", "read_policy", "save_policy", "set_policy", "shape_of",
    "use_policy",
]  # fmt: skip
