# SPDX-License-Identifier: Apache-2.0
"""Addresses of other machines, and errors of what is behind them, without the credentials that either may hold."""

import os
import re
from typing import Any


# Here a name before an `@` is a key. Azure and SSH have a container or a user there, `hf://datasets/ORG/NAME@` a
# revision.
KEY_PROTOCOLS = {"http", "https", "s3", "s3a", "gs", "gcs"}
LOCAL_PROTOCOLS = {"file", "local", "memory"}
# Where an address may hold credentials: `://name:password@` (a password may hold slashes) and `?signature=...`.
USER_INFO = re.compile(r"://(?:[^\s@]*:[^\s@]*|[^/\s@]*)@")
QUERY = re.compile(r"(://[^?\s]*)\?\S*")
# Values of environment variables so named are cut out of what a file system says of itself.
SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)


def is_remote(address: Any) -> bool:
    """Whether an address names a protocol, such as `s3://`."""
    return isinstance(address, str) and "://" in address


def refuse_credentials(address: str) -> None:
    """Refuse an address that holds a key, a password or a query, each of which would be written down with it.

    Args:
        address: An fsspec address, of several links (`zip://*.jsonl::https://...`) too, or a path.

    Raises:
        ValueError: Without repeating what may be a secret.
    """
    for link in address.split("::"):
        protocol, found, rest = link.partition("://")
        host, query = rest.partition("/")[0], rest.partition("?")[2]
        # What stands after a colon is a port, or a password, which may hold a slash.
        password = host.rpartition("@")[0].partition(":")[2] or host.partition(":")[2]
        has_password = "@" in rest and bool(password) and not password.isdecimal()
        has_key = "@" in host and protocol in KEY_PROTOCOLS
        # Elsewhere a lone question mark is a letter of a name or of a pattern.
        has_query = "=" in query or ("?" in rest and protocol in ("http", "https"))
        if found and protocol not in LOCAL_PROTOCOLS and (has_password or has_key or has_query):
            raise ValueError(
                f"The {protocol}:// address holds credentials or a query, which would be written into manifests, "
                "checkpoints and messages. Put credentials into the environment or the configuration of the store's "
                "package."
            )


def without_secrets(text: str) -> str:
    """A text, cut to 300 characters, without the values of environment variables that hold secrets."""
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET_VARIABLE.search(name):
            text = text.replace(value, "<" + name + ">")
    return " ".join(text.split())[:300]


def without_credentials(value: Any) -> Any:
    """JSON whose addresses have lost what is before an `@` and after a `?`, where credentials would be."""
    if isinstance(value, dict):
        return {name: without_credentials(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_credentials(part) for part in value]
    return QUERY.sub(r"\1", USER_INFO.sub("://", value)) if isinstance(value, str) else value


def describe(error: BaseException) -> str:
    """Kind and text of an error, without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}")


__all__ = ["describe", "is_remote", "refuse_credentials", "without_credentials", "without_secrets"]
