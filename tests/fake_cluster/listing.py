"""Lists, in pages where the client wants them."""

import base64
import json

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.kinds import Kind
from tests.fake_cluster.selectors import Matches
from tests.fake_cluster.store import Store

_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results."
)


class Listing:
    """Answers lists. The pages of one list show one moment, whatever is written between them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._moments: dict[int, list[Json]] = {}
        """What is left of lists that are read in pages, by the version they show."""

    def page(self, kind: Kind, namespace: str, selected: Matches, *, limit: int, token: str) -> Json:
        """One page.

        Raises:
            ApiError: 410 where the history that the token points into is lost, 400 for no token of ours.
        """
        version, start = self._read(token) if token else (self._store.version, 0)
        if token:
            if version < self._store.oldest or version not in self._moments:
                raise ApiError(410, _EXPIRED)
            documents = self._moments[version]
        else:
            documents = [each for each in self._store.all(kind, namespace) if selected(each)]
        end = start + limit if limit else len(documents)
        metadata: Json = {"resourceVersion": str(version)}
        if end < len(documents):
            self._moments[version] = documents
            metadata["continue"] = base64.urlsafe_b64encode(json.dumps([version, end]).encode()).decode()
            metadata["remainingItemCount"] = len(documents) - end
        items = documents[start:end]
        return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def _read(self, token: str) -> tuple[int, int]:
        try:
            version, start = json.loads(base64.urlsafe_b64decode(token))
        except ValueError:
            raise ApiError(400, "continue key is not valid: illegal base64 data") from None
        return version, start
