"""What the server answers when it refuses: Kubernetes' own Status object, with its code, reason and message."""

from typing import Any

Json = dict[str, Any]

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """A refusal: becomes a Status answer on Kubernetes' paths, and each other API's own form on theirs."""

    def __init__(self, code: int, message: str, *, reason: str | None = None, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason or _REASONS.get(code, "Unknown")
        self.details = details or {}

    def status(self) -> Json:
        """The answer's body."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(resource: str, name: str) -> ApiError:
    """The answer for an object that does not exist; `resource` is `plural.group`."""
    plural, _, group = resource.partition(".")
    return ApiError(404, f'{resource} "{name}" not found', details={"name": name, "group": group, "kind": plural})


def conflict(resource: str, name: str, why: str) -> ApiError:
    """The answer for a write that is based on an older version of the object."""
    return ApiError(409, f'Operation cannot be fulfilled on {resource} "{name}": {why}', details={"name": name})


def invalid(kind: str, name: str, causes: list[str]) -> ApiError:
    """The answer for an object that breaks the rules of its kind; each cause is `path: what is wrong`."""
    said = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    listed = [{"message": cause.partition(": ")[2], "field": cause.partition(": ")[0]} for cause in causes]
    return ApiError(422, f'{kind} "{name}" is invalid: {said}', details={"name": name, "causes": listed})
