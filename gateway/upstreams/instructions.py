"""Instructions of calls, and the templates that express them to an embedding model. Pure.

Rule: an instruction is applied as its model was trained, or the call is refused; it is never ignored. Only
queries bring one, unless it is the whole prompt: the cards of instruct embedders leave documents as they are.
"""

import msgspec

from backends.contract import Capabilities, Embed, Encode, Operation, Rerank, Score, with_prefix
from backends.instructions import (
    PUBLISHED,
    PUBLISHED_UNPOOLED,
    WHOLE_PROMPT,
    instruction_prompt,
    template_in,
)
from gateway.errors import InvalidInput, NoReplica
from gateway.prompts import Prompts, Role


class InstructedModel(msgspec.Struct, frozen=True):
    """Facts about the model of a call that brings an instruction.

    name: the public name. template: of the configuration. prompts: of configuration and checkpoint, by name.
    capabilities: None while no replica has joined.
    """

    name: str
    template: str | None
    prompts: Prompts
    capabilities: Capabilities | None

    def check_pairs(self) -> None:
        """Check that scores of pairs take an instruction; a replica that has not joined checks it itself.

        Raises: InvalidInput.
        """
        if self.capabilities is not None and not self.capabilities.takes_instruction:
            raise InvalidInput(
                f"the model {self.name!r} takes no `instruction`: send the call without it",
                param="instruction",
            )

    def query_prompt(self, instruction: str) -> str:
        """Return the text that puts an instruction before a query. Raises: InvalidInput, NoReplica."""
        capabilities = self.capabilities
        if capabilities is None:
            raise NoReplica("no replica has reported yet how this model takes an `instruction`")
        if capabilities.typed_inputs:
            raise InvalidInput(
                f"the server of the model {self.name!r} puts its own prompt before a query: send the call "
                "without `instruction`",
                param="instruction",
            )
        template = self._template(capabilities)
        if template is None or Operation.EMBED not in capabilities.operations:
            raise InvalidInput(
                f"the model {self.name!r} has no known template for `instruction`: write it into the texts, "
                "or have `instruction_template` set for its upstream",
                param="instruction",
            )
        return instruction_prompt(template, instruction)

    def check_role(self, role: Role | None) -> None:
        """Check that the inputs may bring an instruction: queries, or all if it is the whole prompt.

        Raises: InvalidInput.
        """
        is_whole_prompt = self.capabilities is not None and self._template(self.capabilities) == WHOLE_PROMPT
        if role == "document" and not is_whole_prompt:
            raise InvalidInput("`instruction` is for queries: send documents without it", param="instruction")

    def _template(self, capabilities: Capabilities) -> str | None:
        published = PUBLISHED if capabilities.pools_prompt else PUBLISHED_UNPOOLED
        return self.template or template_in(self.prompts.values()) or published.get(capabilities.model_id)


def with_pair_instruction(work: Rerank | Score, instruction: str, model: InstructedModel) -> Rerank | Score:
    """Return a request for scores with its instruction, which its replica applies. Raises: InvalidInput."""
    model.check_pairs()
    return msgspec.structs.replace(work, instruction=instruction)


def with_query_prompt(work: Embed | Encode, prompt: str) -> Embed | Encode:
    """Return the work with a prompt before each text, in place of a named prompt."""
    return msgspec.structs.replace(work, inputs=with_prefix(work, prompt), prompt_name="")
