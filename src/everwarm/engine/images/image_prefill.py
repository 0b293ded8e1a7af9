"""Reading pictures: each whole and by itself, between two steps of text. It has embeddings instead of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everwarm.engine.images.image_cache import ImageCache
from everwarm.engine.recovery import start_over, suspend_or_finish
from everwarm.engine.request import Event, Finish, Request
from everwarm.engine.slots import Slot
from everwarm.errors import ContextFull, DecodeFailed, EverwarmError
from everwarm.prompt.prompt import MediaItem

if TYPE_CHECKING:
    from everwarm.engine.core import Core


def see_next(core: Core, gallery: ImageCache, events: list[Event]) -> None:
    """One picture, for the oldest request that has come to one."""
    for i in core.oldest_first():
        slot = core.slots[i]
        request = slot.request
        item = None if request is None else request.media_at(slot.n_fed)
        if request is not None and item is not None:
            return _see(core, gallery, slot, request, item, events)


def _see(core: Core, gallery: ImageCache, slot: Slot, request: Request, item: MediaItem, events: list[Event]) -> None:
    end, wants_logits = request.ask.prompt.mark(slot.n_fed + 1), slot.n_fed + 1 == request.n_items
    while slot.request is request and not core.keeper.make_room(item.n_tokens, keep=slot):
        suspend_or_finish(core, ContextFull(f"a picture needs {item.n_tokens} cells"), events)
    if slot.request is not request:
        return
    try:
        embedding = gallery.embedding(item, request.ask.pictures, request.ask.namespace)
        core.context.see(slot.seq, gallery.media, embedding, end, wants_logits=wants_logits)
    except ContextFull as error:
        suspend_or_finish(core, error, events)
    except DecodeFailed as error:
        core.context.drop(slot.seq)  # it is not empty yet if the picture was not even encoded
        start_over(core, [slot], error, events)
    except EverwarmError as error:
        core.finish(slot, request, Finish.ERROR, events, error)
    else:
        core.move_on(slot, request, 1, 0 if wants_logits else None, events)
