"""How agents speak: one voice for each dialect. A voice is the client's side of a wire format."""

from __future__ import annotations

from gauntlet.voices.base import Voice
from gauntlet.voices.chat import Chat
from gauntlet.voices.gemini import Gemini
from gauntlet.voices.messages import Messages
from gauntlet.voices.responses import Responses

VOICES: dict[str, Voice] = {"chat": Chat(), "responses": Responses(), "messages": Messages(), "gemini": Gemini()}
