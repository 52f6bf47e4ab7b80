"""Console of all pages: its own colours reach the terminal, escape sequences in the text that it shows do not."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rft_core.terminal_text import visible


class SafeConsole(Console):
    """A console that shows what would steer the terminal as visible marks, wherever it stands in a page."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; the text of a segment holds no control character."""
        for segment in super().render(renderable, options):
            # what rich itself sends to move the cursor is a control segment, whose text is no text of anybody
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
