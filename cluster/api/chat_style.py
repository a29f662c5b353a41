"""How a model speaks: its chat template, the format of its calls, the marks of its thoughts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.config import ModelConfig
from quire.engine.errors import ConfigError

from .reasoning import ReasoningMarks, detect_marks
from .tools import FORMATS, ToolFormat, detect_format

TEMPLATES = Path(__file__).parent / "tools" / "templates"  # those that come with Quire, NAME.jinja


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """`templates` are the model's own by name: `default`, and some models have `tool_use`; none: it cannot chat.

    What is not set is told by the template in use, so that a template of the request's own is understood as well.
    """

    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)  # as templates know them: bos_token, ...
    set_format: ToolFormat | None = None
    set_marks: ReasoningMarks | None = None

    @classmethod
    def of(cls, tokenizer: Any, config: ModelConfig | None = None) -> ChatStyle:
        """The style of a model's tokenizer, with what the configuration sets instead. Raises `ConfigError`."""
        config = config or ModelConfig()
        templates = tokenizer.chat_template or {}
        if config.chat_template is not None:
            templates = _read_template(config.chat_template)
        return cls(
            {"default": templates} if isinstance(templates, str) else dict(templates),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
            None if config.tool_parser is None else FORMATS[config.tool_parser],
            None if config.reasoning_marks is None else ReasoningMarks(*config.reasoning_marks),
        )

    def template_for(self, *, tools: bool) -> str | None:
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")

    def format_of(self, template: str) -> ToolFormat | None:
        return self.set_format or detect_format(template)

    def marks_of(self, template: str) -> ReasoningMarks | None:
        return self.set_marks or detect_marks(template)


def _read_template(name: str) -> str:
    """A template by the name of one of ours, or from a file. Raises `ConfigError`."""
    own = TEMPLATES / f"{name}.jinja"
    path = own if own.parent == TEMPLATES and own.is_file() else Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        known = ", ".join(sorted(each.stem for each in TEMPLATES.glob("*.jinja")))
        raise ConfigError(
            f"chat_template: {name!r} is neither a file that can be read nor one that comes with Quire ({known})."
        ) from error
