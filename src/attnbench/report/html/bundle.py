"""Vega, Vega-Lite and vega-embed as one script, from the package that also draws the PNGs."""

from __future__ import annotations

import functools

import altair
import vl_convert

VEGA_LITE = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version that the charts are written for."""


@functools.cache
def vega_script() -> str:
    """JavaScript that defines the global `vegaEmbed`; it imports nothing and asks for nothing."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
