"""Clients for the four dialects: each one implements the agent's side of a wire format."""

from __future__ import annotations

from gauntlet.clients.base import Client
from gauntlet.clients.chat import ChatClient
from gauntlet.clients.gemini import GeminiClient
from gauntlet.clients.messages import MessagesClient
from gauntlet.clients.responses import ResponsesClient

CLIENTS: dict[str, Client] = {
    "chat": ChatClient(),
    "responses": ResponsesClient(),
    "messages": MessagesClient(),
    "gemini": GeminiClient(),
}
