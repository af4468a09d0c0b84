"""The gateways that the Gauntlet can test. To add one, write a module and add it to the list."""

from __future__ import annotations

from gauntlet.gateways.agentcore import AgentCore, AgentCoreLinear
from gauntlet.gateways.base import Gateway
from gauntlet.gateways.litellm import LiteLLM
from gauntlet.gateways.openenv import OpenEnv
from gauntlet.gateways.rllm import Rllm
from gauntlet.gateways.turngate import Turngate, TurngateDrop
from gauntlet.gateways.verifiers import Verifiers, VerifiersRelay

GATEWAYS: dict[str, type[Gateway]] = {
    gateway.name: gateway
    for gateway in (
        Turngate,
        TurngateDrop,
        OpenEnv,
        AgentCore,
        AgentCoreLinear,
        Verifiers,
        VerifiersRelay,
        Rllm,
        LiteLLM,
    )
}
