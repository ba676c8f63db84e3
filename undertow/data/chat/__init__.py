"""DeepSeek-V4's chat format: messages to tokens for training, RL and serving, and a model's answer back into messages.

`encode` makes a prompt or an example to learn from, `ChatParser` and `TokenParser` read an answer as it is generated.
"""

from undertow.data.chat.conversations import Conversation, conversation, encode_conversations, read_conversations
from undertow.data.chat.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    End,
    Event,
    Reasoning,
    joined,
    message_of,
)
from undertow.data.chat.markers import ANSWER, ASSISTANT, DSML, MARKERS, REMINDER, TASKS, THINK, USER, marker_ids
from undertow.data.chat.message import ROLES, Message, ToolCall, with_tools
from undertow.data.chat.parser import ChatParser, TokenParser
from undertow.data.chat.reading import read_messages, read_tools
from undertow.data.chat.render import Effort, Piece, opens_answer, render, text_of
from undertow.data.chat.tokens import Encoded, encode, encode_pieces

__all__ = [
    "ANSWER", "ASSISTANT", "DSML", "MARKERS", "REMINDER", "ROLES", "TASKS", "THINK", "USER",
    "CallArguments", "CallEnd", "CallStart", "ChatParser", "Content", "Conversation", "Effort", "Encoded", "End",
    "Event", "Message", "Piece", "Reasoning", "TokenParser", "ToolCall", "conversation", "encode",
    "encode_conversations", "encode_pieces", "joined", "marker_ids", "message_of", "opens_answer",
    "read_conversations", "read_messages", "read_tools", "render", "text_of", "with_tools",
]  # fmt: skip
