"""Errors of the API, as grpc-gateway answers them with an HTTP status, and a JSON object with the
code of gRPC and a message.

Source: grpc.io/docs/guides/status-codes, Argo's server/utils/errors.go.
"""

import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from argolocal.errors import ArgolocalError, describe

log = logging.getLogger("uvicorn.error")

INVALID_ARGUMENT = 3
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
OUT_OF_RANGE = 11
UNIMPLEMENTED = 12
INTERNAL = 13
UNAUTHENTICATED = 16

# code of gRPC → status of HTTP
HTTP_STATUS: Mapping[int, int] = {
    INVALID_ARGUMENT: 400,
    NOT_FOUND: 404,
    ALREADY_EXISTS: 409,
    PERMISSION_DENIED: 403,
    RESOURCE_EXHAUSTED: 429,
    OUT_OF_RANGE: 410,
    UNIMPLEMENTED: 501,
    INTERNAL: 500,
    UNAUTHENTICATED: 401,
}


class ApiError(Exception):
    """An error that a client gets. `code`: code of gRPC."""

    def __init__(self, code: int, message: str, http_status: int | None = None) -> None:
        """`http_status`: status of HTTP (default: HTTP_STATUS of the code)."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status or HTTP_STATUS[code]


def missing_object(plural: str, name: str) -> ApiError:
    """Return the error of the Kubernetes API for an object that does not exist."""
    return ApiError(NOT_FOUND, f'{plural}.argoproj.io "{name[:253]}" not found')


def missing_namespace(namespace: str) -> ApiError:
    """Return the error of the Kubernetes API for an object in a namespace that does not exist."""
    return ApiError(NOT_FOUND, f'namespaces "{namespace[:253]}" not found')


def make_api_error(error: Exception, subject: str) -> ApiError:
    """Return the error that a client gets for an exception. The traceback of an unexpected
    exception is logged. `subject`: description of the request for the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        code = {404: NOT_FOUND, 405: UNIMPLEMENTED}.get(error.status_code, INTERNAL)
        return ApiError(code, str(error.detail), error.status_code)
    if not isinstance(error, ArgolocalError | OSError):
        log.error("%s failed", subject, exc_info=error)
    return ApiError(INTERNAL, describe(error))


def error_response(error: ApiError) -> Response:
    """Return the answer to a request that failed."""
    return JSONResponse(
        {"code": error.code, "message": error.message, "details": []}, error.http_status
    )
