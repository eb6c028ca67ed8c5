"""Server-sent events of JSON, which end at the end of a line."""

from nano_inference.serving.protocols.pieces import encode

# Some clients split a stream's text at these too, and not only at line feeds.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


# the end's mark of OpenAI's streams, and of all that are modelled on them
DONE = b"data: [DONE]\n\n"


def data_event(value: object) -> bytes:
    """An event that has data and no name."""
    return b"data: %b\n\n" % encode_line(value)


def encode_line(value: object) -> bytes:
    """JSON of one line, whatever a client takes for a line's end."""
    data = encode(value)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data
