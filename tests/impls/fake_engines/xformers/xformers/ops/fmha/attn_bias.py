from dataclasses import dataclass


class LowerTriangularMask:
    """Aligned top-left."""


class LowerTriangularFromBottomRightMask:
    """Aligned bottom-right."""


@dataclass
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int

    def __post_init__(self):
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value passed to `LocalAttentionFromBottomRightMask`")
