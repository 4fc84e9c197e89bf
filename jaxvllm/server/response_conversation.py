"""`ResponseConversation`: what a request of `/v1/responses` is about, with what it takes from stored responses."""

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from jaxvllm.server.errors import ApiError
from jaxvllm.server.exchange import encode
from jaxvllm.server.protocol.response_items import InputItem, ItemReference, listed
from jaxvllm.server.protocol.responses import ResponsesRequest
from jaxvllm.server.response_store import ResponseStore, StoredResponse

# The items of stored responses.
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True)
class ResponseConversation:
    """A request, and the items that its response is to be stored with."""

    request: ResponsesRequest  # with the items of the response that it follows, and those that it refers to
    owner: bytes  # the digest of the API keys
    store_in: ResponseStore | None  # None: the response is not stored
    items: list[dict[str, Any]]  # all that it answers, as they are listed
    new_ids: tuple[str, ...]  # that items of the request itself got here

    @classmethod
    def of(cls, request: ResponsesRequest, responses: ResponseStore | None, owner: bytes) -> "ResponseConversation":
        """Completes the request. Raises ApiError for a response or an item that is not stored for its owner."""
        before = _before(request, responses, owner)
        whole = _without_references(request, responses, owner)
        if request.store is False:
            responses = None
        new = [] if responses is None else listed(whole.input)
        # A client's own id may be that of another item.
        new_ids = tuple(item["id"] for item, given in zip(new, whole.input, strict=False) if given.id is None)
        if before:
            whole = whole.following(_ITEMS.validate_python(before))
        return cls(whole, owner, responses, before + new, new_ids)

    @property
    def is_stored(self) -> bool:
        return self.store_in is not None

    def store(self, response: dict[str, Any]) -> None:
        """Stores the response to the request, which has ended, unless the client or the server wants none stored."""
        if self.store_in is not None:
            ids = (*self.new_ids, *(item["id"] for item in response["output"]))
            self.store_in.add(self.owner, response["id"], StoredResponse(encode(response), encode(self.items), ids))


def _before(request: ResponsesRequest, responses: ResponseStore | None, owner: bytes) -> list[dict[str, Any]]:
    """Returns the items of the response that the request follows, and its output."""
    if (name := request.previous_response_id) is None:
        return []
    if responses is None:
        raise ApiError(
            400,
            "previous_response_id needs a server with one API process: send the whole conversation as input",
            param="previous_response_id",
        )
    if (found := responses.find(owner, name)) is None:
        raise ApiError(
            400,
            f"previous_response_id: there is no response with id {name!r:.80}: send the whole conversation",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.all_items()


def _without_references(request: ResponsesRequest, responses: ResponseStore | None, owner: bytes) -> ResponsesRequest:
    """Returns the request with the stored items in the place of the references to them."""
    wanted = [item.id for item in request.input if isinstance(item, ItemReference)]
    if not wanted:
        return request
    found = {} if responses is None else responses.items(owner, wanted)
    for item_id in wanted:
        if item_id not in found:
            raise ApiError(
                400,
                f"input: there is no stored item with id {item_id!r:.80}: send the item itself, or set store to true "
                "in the request that makes it, on a server with one API process",
                param="input",
            )
    referred = iter(_ITEMS.validate_python([found[item_id] for item_id in wanted]))
    items = [next(referred) if isinstance(item, ItemReference) else item for item in request.input]
    return request.model_copy(update={"input": items})
