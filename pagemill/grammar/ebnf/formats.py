"""Formats of JSON Schema as regular expressions, for backends that know no formats."""

from typing import Final

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:(?:[1-9]\\d{3}|0[1-9]\\d{2}|00[1-9]\\d|000[1-9])-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))"
    f"|(?:\\d\\d{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:[Zz]|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
_N = "\\d{1,9}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:{_N}W|(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?|{_CLOCK})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL}){{0,7}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_BYTE = "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = "|".join(
    [f"(?:{_H}:){{6}}{_LAST}", f"::(?:{_H}:){{5}}{_LAST}"]
    + [f"(?:{_H}(?::{_H}){{0,{n}}})?::(?:{_H}:){{{4 - n}}}{_LAST}" for n in range(5)]
    + [f"(?:{_H}(?::{_H}){{0,5}})?::{_H}", f"(?:{_H}(?::{_H}){{0,6}})?::"]
)
_URI_CHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"

FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,3}}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:{_URI_CHAR}*(?:\\?(?:{_URI_CHAR}|\\?)*)?(?:#(?:{_URI_CHAR}|\\?)*)?",
}
"""Name -> what a text of this format matches as a whole. Every text is one of the format; not every one is allowed."""
