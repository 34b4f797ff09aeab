"""Format addresses for messages and records without the secrets that they may contain.

A secret is a password, or the value of a query, a fragment or a path parameter. In presigned
addresses, the values of queries are signatures and tokens. A malformed address often contains an
unescaped password, so only its scheme is shown.
"""

import re
from collections.abc import Callable

HIDDEN_MARK = "…"
MAX_TEXT_CHARS = 20_000
# limit of a line's length, because the search for secrets in a line takes O(n²)
MAX_LINE_CHARS = 2000
# appended to a truncated line: the @ makes a truncated user or password at the end recognizable
CUT_MARK = "@..."
HOST = r"(?:\[[0-9a-f:.%]+\]|[\w.-]+)"
PORT_AND_PATH = r"(?::\w*)?(?:/[^\s?#@;]*)?"
SCHEME = r"(?:[a-z][a-z0-9+.-]*:)?//"
NO_SCHEME = r"(?![a-z][a-z0-9+.-]*:/)"

# an address whose parts are unambiguous; group 2 (host, port and path) contains no secret
CLEAN_ADDRESS = re.compile(
    rf"({SCHEME}|{NO_SCHEME})(?:[^\s/?#@]*@)?({HOST}{PORT_AND_PATH})", re.IGNORECASE
)
# the start of an address, up to its query, fragment or parameters, if they contain no @
CLEAN_ADDRESS_START = re.compile(
    rf"(?:{SCHEME}|{NO_SCHEME}){HOST}{PORT_AND_PATH}(?=[?#;][^@]*$)", re.IGNORECASE
)

# the start of a word; an address without a scheme may begin there
WORD_START = r"(?<![^\s'\"`=(\[{,<])"
# an @ that may end a password, unlike the @ before the digest of an image
AT_SIGN = r"@(?!sha(?:256|512):)"
# the text after the `HOST:` of an address without a password: a port or punctuation
AFTER_HOST = r"\d*[]'\"`.,:;)}]*(?:[/?#\s]|$)"

# user and password of an address in a text. A password may contain slashes, spaces and @.
USER_IN_ADDRESS = re.compile(
    rf"""
    ((?:(?<=:)|{WORD_START})//)
    (?:
        # a password, to the last @ of the word
        [^\s/?\#@:]+:(?!{AFTER_HOST})(?:(?!://)\S)*{AT_SIGN}(?=[\w.\[-])
        # a user without a password
        | [^\s/?\#]*{AT_SIGN}(?=[\w.\[-])
        # a password with spaces, to the last @ of the line
        | [^\s/?\#@:]+:(?!{AFTER_HOST})(?:(?!://)[^\n])*{AT_SIGN}(?=[\w.\[-])
        # a user without a host
        | [^\s/?\#]*{AT_SIGN}
    )
    """,
    re.VERBOSE,
)
USER_WITHOUT_SCHEME = re.compile(
    rf"{WORD_START}(?!(?:models|runs|mailto):)[^\s/:@'\"`=?#]+:(?!//)\S*{AT_SIGN}", re.IGNORECASE
)
# `//host:port/path@` or `//user:password@`; both forms are possible, so the text is hidden
HOST_OR_USER = re.compile(rf"((?:(?<=:)|{WORD_START})//)[^\s/?#@:]+:\d+[/?#]\S*{AT_SIGN}")

# the query or fragment of an address, without punctuation at the end
SECRET_TEXT = r"(?:[^\s'\"<>()#]|['\"<>()](?=[\w%&=+/-]))*[^\s'\"<>()\]}:.,;#]"
QUERY_IN_ADDRESS = re.compile(rf"(://[^\s?#'\"]*\?){SECRET_TEXT}")
# The fragment of an address is hidden unless it is the path of a page, as in MLflow, or the anchor
# of a heading.
PAGE_FRAGMENT = r"(?:/[\w./-]*|[a-z]+(?:-[a-z0-9]+)*)(?:[\s?'\"<>).,:]|$)"
FRAGMENT_IN_ADDRESS = re.compile(rf"(://[^\s#'\"]*\#)(?!{PAGE_FRAGMENT}){SECRET_TEXT}")
PARAMETERS_IN_ADDRESS = re.compile(rf"(://[^\s?#;'\"]*;)(?=[\w.-]+=){SECRET_TEXT}")
# the name of a parameter whose value is a secret
SECRET_NAME = (
    r"[\w.-]*(?:token|sig|signature|secret|passw(?:or)?d|pwd|credential|session|api_?key|"
    r"access_?key(?:_?id)?|auth|authorization)"
)
# a secret parameter of an address that may lack a scheme; `code` and `key` are secrets only in some
# addresses
SECRET_VALUE = re.compile(rf"([?&;#](?:{SECRET_NAME}|code|key)=){SECRET_TEXT}", re.IGNORECASE)


def format_address(address: str) -> str:
    """Return scheme, host, port and path of an address for a message.

    If a query, a fragment or a possible password follows, return only the part before it and `…`.
    """
    match = CLEAN_ADDRESS.fullmatch(address)
    if match:
        return match[1] + match[2]

    match = CLEAN_ADDRESS_START.match(address)
    if match:
        return match[0] + HIDDEN_MARK

    if not re.search("[@?#;%]", address):
        return address

    scheme = re.match(SCHEME, address, re.IGNORECASE)
    return (scheme[0] if scheme else "") + HIDDEN_MARK


def remove_address_secrets(text: str) -> str:
    """Remove the secrets of the addresses in a text: user, password, query and fragment."""
    return _map_lines(_hide_in_line, text)


def hide_address_values(text: str) -> str:
    """Remove queries, fragments and parameters from the addresses in a text, but keep the users."""
    return _map_lines(_hide_values_in_line, text)


def _map_lines(hide_in_line: Callable[[str], str], text: str) -> str:
    """Apply `hide_in_line` to each line; return at most MAX_TEXT_CHARS characters of the text,
    and at most MAX_LINE_CHARS of each line."""
    is_cut = len(text) > MAX_TEXT_CHARS
    *lines, last_line = text[:MAX_TEXT_CHARS].split("\n")
    shown_lines = [_hide_in_cut_line(hide_in_line, line, is_cut=False) for line in lines]
    shown_lines.append(_hide_in_cut_line(hide_in_line, last_line, is_cut=is_cut))
    return "\n".join(shown_lines)


def _hide_in_cut_line(hide_in_line: Callable[[str], str], line: str, *, is_cut: bool) -> str:
    """Apply `hide_in_line` to the first MAX_LINE_CHARS characters of a line. `is_cut` is True if
    the caller has already cut the end of the line off."""
    if len(line) <= MAX_LINE_CHARS and not is_cut:
        return hide_in_line(line)
    return (
        hide_in_line(line[:MAX_LINE_CHARS] + CUT_MARK).removesuffix(CUT_MARK).removesuffix("...")
        + "..."
    )


def _hide_in_line(line: str) -> str:
    line = USER_IN_ADDRESS.sub(r"\1", line)
    line = HOST_OR_USER.sub(rf"\1{HIDDEN_MARK}@", line)
    return _hide_values_in_line(USER_WITHOUT_SCHEME.sub("", line))


def _hide_values_in_line(line: str) -> str:
    for pattern in (QUERY_IN_ADDRESS, FRAGMENT_IN_ADDRESS, PARAMETERS_IN_ADDRESS, SECRET_VALUE):
        line = pattern.sub(rf"\1{HIDDEN_MARK}", line)
    return line
