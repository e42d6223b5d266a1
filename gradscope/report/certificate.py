"""The certificate's verdict in one line."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from gradscope.report.text import short, visible


def verdict(certificate: Mapping[str, Any]) -> Text:
    """Return what the proof on the first batch came to."""
    verified = certificate.get("verified")
    if verified is None:
        return Text("not recorded", style="yellow")
    if not verified:
        return Text("NOT VERIFIED: verification was switched off", style="bold yellow")
    completeness, agreement = _error(certificate, "completeness"), _error(certificate, "agreement")
    text = f"verified: sum to {completeness}, single samples to {agreement}"
    return Text(f"{text} ({visible(str(certificate.get('dtype')))})", style="green")


def unused(certificate: Mapping[str, Any]) -> str | None:
    """Return the names of the parameters that no sample's loss reached, or None."""
    names = certificate.get("unused")
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) and names else None


def _error(certificate: Mapping[str, Any], check: str) -> str:
    found = certificate.get(check)
    error = found.get("error") if isinstance(found, Mapping) else None
    return short(error) if isinstance(error, int | float) else "an unknown error"
