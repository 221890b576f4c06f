"""The page on which one talks to the model."""
import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

PAGE = Path(__file__).with_name("ui.html")


async def page(http: HttpRequest) -> Response:
    html = PAGE.read_text(encoding="utf-8")
    return HTMLResponse(html, headers={"Content-Security-Policy": content_security_policy(html)})


def content_security_policy(html: str) -> str:
    """Of a page in one file: its own inline scripts and styles run, by their hash; it talks to this server only."""
    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL | re.IGNORECASE)
        sums = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents]
        return " ".join(f"'sha256-{checksum}'" for checksum in sums)

    return (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
