"""Format addresses for messages and records without the secrets that they may contain.

A secret is a password, or the value of a query, a fragment or a path parameter. In presigned
addresses, these values are signatures and tokens. A malformed address often contains an unescaped
password, so only its scheme is shown.
"""

import re
from collections.abc import Callable

HIDDEN = "…"
MAX_TEXT_CHARS = 20_000
MAX_LINE_CHARS = 2000  # the search for secrets in a line takes O(n²)
# appended to a truncated line: the @ makes a truncated user or password at the end recognizable
CUT = "@..."
HOST = r"(?:\[[0-9a-f:.%]+\]|[\w.-]+)"
PORT_AND_PATH = r"(?::\w*)?(?:/[^\s?#@;]*)?"
SCHEME = r"(?:[a-z][a-z0-9+.-]*:)?//"
NO_SCHEME = r"(?![a-z][a-z0-9+.-]*:/)"

# an address that cannot be misread; group 2 (host, port and path) contains no secret
CLEAN = re.compile(rf"({SCHEME}|{NO_SCHEME})(?:[^\s/?#@]*@)?({HOST}{PORT_AND_PATH})", re.IGNORECASE)
# the start of an address, up to its query, fragment or parameters, if they contain no @
CLEAN_START = re.compile(
    rf"(?:{SCHEME}|{NO_SCHEME}){HOST}{PORT_AND_PATH}(?=[?#;][^@]*$)", re.IGNORECASE
)

# the start of a word; an address without a scheme may begin there
WORD = r"(?<![^\s'\"`=(\[{,<])"
# an @ that may end a password, unlike the @ before the digest of an image
AT = r"@(?!sha(?:256|512):)"
# the text after the `HOST:` of an address without a password: a port or punctuation
AFTER_HOST = r"\d*[]'\"`.,:;)}]*(?:[/?#\s]|$)"

# user and password of an address in a text. A password may contain slashes, spaces and @.
USER = re.compile(
    rf"""
    ((?:(?<=:)|{WORD})//)
    (?:
        # a password, to the last @ of the word
        [^\s/?\#@:]+:(?!{AFTER_HOST})(?:(?!://)\S)*{AT}(?=[\w.\[-])
        # a user without a password
        | [^\s/?\#]*{AT}(?=[\w.\[-])
        # a password with spaces, to the last @ of the line
        | [^\s/?\#@:]+:(?!{AFTER_HOST})(?:(?!://)[^\n])*{AT}(?=[\w.\[-])
        # a user without a host
        | [^\s/?\#]*{AT}
    )
    """,
    re.VERBOSE,
)
USER_WITHOUT_SCHEME = re.compile(
    rf"{WORD}(?!(?:models|runs|mailto):)[^\s/:@'\"`=?#]+:(?!//)\S*{AT}", re.IGNORECASE
)
# the host and port of an address whose path contains @, or a user and the start of a password
HOST_OR_USER = re.compile(rf"((?:(?<=:)|{WORD})//)[^\s/?#@:]+:\d+[/?#]\S*{AT}")

# the query or fragment of an address, without punctuation at the end
REST = r"(?:[^\s'\"<>()#]|['\"<>()](?=[\w%&=+/-]))*[^\s'\"<>()\]}:.,;#]"
QUERY = re.compile(rf"(://[^\s?#'\"]*\?){REST}")
# A fragment is hidden unless it is the path of a page, as in MLflow, or the anchor of a heading.
PAGE = r"(?:/[\w./-]*|[a-z]+(?:-[a-z0-9]+)*)(?:[\s?'\"<>).,:]|$)"
FRAGMENT = re.compile(rf"(://[^\s#'\"]*\#)(?!{PAGE}){REST}")
PARAMETERS = re.compile(rf"(://[^\s?#;'\"]*;)(?=[\w.-]+=){REST}")
# the name of a parameter whose value is a secret
SECRET_NAME = (
    r"[\w.-]*(?:token|sig|signature|secret|passw(?:or)?d|pwd|credential|session|api_?key|"
    r"access_?key(?:_?id)?|auth|authorization)"
)
# a secret parameter of an address that may lack a scheme; `code` and `key` are secrets only in some
# addresses
NAMED_VALUE = re.compile(rf"([?&;#](?:{SECRET_NAME}|code|key)=){REST}", re.IGNORECASE)


def format_address(address: str) -> str:
    """Return scheme, host, port and path of an address for a message.

    If a query, a fragment or a possible password follows, return only the part before it and `…`.
    """
    match = CLEAN.fullmatch(address)
    if match:
        return match[1] + match[2]

    match = CLEAN_START.match(address)
    if match:
        return match[0] + HIDDEN

    if not re.search("[@?#;%]", address):
        return address

    scheme = re.match(SCHEME, address, re.IGNORECASE)
    return (scheme[0] if scheme else "") + HIDDEN


def without_secrets(text: str) -> str:
    """Remove the secrets of the addresses in a text: user, password, query and fragment."""
    return _map_lines(_hide_in_line, text)


def hide_values(text: str) -> str:
    """Remove queries, fragments and parameters from the addresses in a text, but keep the users."""
    return _map_lines(_hide_values_in_line, text)


def _map_lines(hide: Callable[[str], str], text: str) -> str:
    """Apply `hide` to each line; return at most MAX_TEXT_CHARS characters of the text, and at most
    MAX_LINE_CHARS of each line."""
    is_cut = len(text) > MAX_TEXT_CHARS
    *lines, last_line = text[:MAX_TEXT_CHARS].split("\n")
    shown_lines = [_hide_in_part(hide, line, is_cut=False) for line in lines]
    shown_lines.append(_hide_in_part(hide, last_line, is_cut=is_cut))
    return "\n".join(shown_lines)


def _hide_in_part(hide: Callable[[str], str], line: str, *, is_cut: bool) -> str:
    """Apply `hide` to a line. Of a longer line, keep only the first MAX_LINE_CHARS characters."""
    if len(line) <= MAX_LINE_CHARS and not is_cut:
        return hide(line)
    return hide(line[:MAX_LINE_CHARS] + CUT).removesuffix(CUT).removesuffix("...") + "..."


def _hide_in_line(line: str) -> str:
    line = USER.sub(r"\1", line)
    line = HOST_OR_USER.sub(rf"\1{HIDDEN}@", line)
    return _hide_values_in_line(USER_WITHOUT_SCHEME.sub("", line))


def _hide_values_in_line(line: str) -> str:
    for pattern in (QUERY, FRAGMENT, PARAMETERS, NAMED_VALUE):
        line = pattern.sub(rf"\1{HIDDEN}", line)
    return line
