"""Who may use the live page: programs on this machine that have its address, and no other website in the same browser.

The address contains a random token, without which every answer is 404. The name in the address must be that of this machine
(`localhost`), so that no website can reach the page under its own name. What changes something must be a POST request of the
page itself: with the token as a header, which other websites cannot send, and with the page as its origin.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
TOKEN_HEADER = "X-Forgefield-Token"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Sent with every answer. The page loads nothing from elsewhere."""
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
"""For reports, which may come from others: they have no access to the page."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_local(host: str | None) -> bool:
    """Whether the header `Host` names this machine, at any port (it may be forwarded by ssh)."""
    try:
        return urlsplit(f"//{host}").hostname in LOCAL_NAMES if host else False
    except ValueError:
        return False


def may_read(headers: Mapping[str, str], token: str, given: str) -> bool:
    """Whether a request may be answered. token: of the page. given: that in the address."""
    return is_local(headers.get("Host")) and hmac.compare_digest(token.encode(), given.encode())


def may_change(headers: Mapping[str, str], token: str) -> bool:
    """Whether a POST request, which `may_read`, comes from the page itself."""
    return (
        hmac.compare_digest(token.encode(), (headers.get(TOKEN_HEADER) or "").encode())
        and headers.get("Origin") == f"http://{headers.get('Host')}"
        and headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"
        and (headers.get("Content-Type") or "").partition(";")[0].strip() == "application/json"
    )
