"""The certificate's verdict in one line."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from gradscope.report.text import visible


def verdict(certificate: Mapping[str, Any]) -> Text:
    """Return what the proof on the first batch came to."""
    verified = certificate.get("verified")
    if verified is None:
        return Text("not recorded", style="yellow")
    if not verified:
        return Text("NOT VERIFIED: verification was switched off", style="bold yellow")
    return Text(visible(str(certificate.get("verdict", "passed"))), style="green")


def unused(certificate: Mapping[str, Any]) -> str | None:
    """Return the names of the parameters that no sample's loss reached, or None."""
    names = certificate.get("unused")
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) and names else None
