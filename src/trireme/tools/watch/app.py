"""The screen of `trireme watch`: curves, rooms with their logs side by side, the health and the incidents of all parts,
and recorded rollouts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option
from textual_plotext import PlotextPlot

from trireme.checkpoint.rows import ROLLOUTS, recorded_steps
from trireme.run.rollout_records import read_records
from trireme.supervision.status import Status, read_incidents
from trireme.tools.watch import drawing
from trireme.tools.watch.following import REFRESH_S, Follower


class Watch(App[None]):
    """Reads the run directory every second. `open_tokenizer` is called when rollouts are first shown; None: tokens
    stay numbers."""

    TITLE = "trireme watch"
    CSS = """
    #headline { dock: top; height: 1; background: $primary; color: $text; padding: 0 1; }
    #curve_names { width: 36; }
    #rooms { height: auto; margin: 0 0 1 0; }
    .log { width: 1fr; border: round $primary; padding: 0 1; }
    #parts { height: auto; margin: 0 0 1 0; }
    #incidents { border: round $primary; padding: 0 1; }
    #groups { width: 44; }
    #group { width: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("c", "show('curves')", "curves"),
        ("r", "show('rooms_tab')", "rooms"),
        ("h", "show('health')", "health"),
        ("g", "show('rollouts')", "rollouts"),
        ("t", "per_token", "text or tokens"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, follower: Follower, open_tokenizer: Callable[[], Any] | None) -> None:
        super().__init__()
        self.follower = follower
        self._open_tokenizer = open_tokenizer
        self._tokenizer: Any = None
        self._per_token = False
        self._group: Any = None
        self._steps: list[int] = []

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        with TabbedContent(initial="curves"):
            with TabPane("Curves", id="curves"), Horizontal():
                yield OptionList(id="curve_names")
                yield PlotextPlot(id="curve")
            with TabPane("Rooms", id="rooms_tab"):
                yield Static(id="rooms")
                yield Horizontal(id="logs")
            with TabPane("Health", id="health"):
                yield Static(id="standing")
                yield Static(id="parts")
                with VerticalScroll(id="incidents"):
                    yield Static(id="incidents_text")
            with TabPane("Rollouts", id="rollouts"), Horizontal():
                yield OptionList(id="groups")
                with VerticalScroll(id="group"):
                    yield Static(id="group_text")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#incidents").border_title = "what happened"
        await self.refresh_run()
        self.set_interval(REFRESH_S, self.refresh_run)

    async def refresh_run(self) -> None:
        """Updates the screen."""
        if not self.is_running:  # called once more while the screen closes
            return
        changed = self.follower.poll()
        driver, status, now = self.follower.driver(), Status.read(self.follower.root), datetime.now(UTC)
        line = drawing.headline(self.follower.config, self.follower.rows, driver)
        trouble = drawing.troubles(status, now.timestamp()) if drawing.goes_on(driver) else ""
        incidents = drawing.incidents_text(read_incidents(self.follower.root), now)
        self._show("#headline", Text(f"{self.follower.root.name}  {line}  {trouble}"))
        self._show("#standing", Text(drawing.standing(status, driver)))
        self._show("#parts", drawing.parts_table(status, driver, now))
        self._show("#incidents_text", incidents)
        if changed:
            self._refresh_curves()
            self._show("#rooms", drawing.rooms_table(self.follower.rows))
        await self._refresh_logs()
        self._refresh_groups()

    def _show(self, place: str, shown: RenderableType) -> None:
        self.query_one(place, Static).update(shown)

    def _refresh_curves(self) -> None:
        names = self.query_one("#curve_names", OptionList)
        known = {option.id for option in names.options}
        names.add_options([Option(n, id=n) for n in drawing.curve_names(self.follower.rows) if n not in known])
        if names.highlighted is None and names.option_count:
            names.highlighted = 0
        self._draw()

    def _draw(self) -> None:
        names, plot = self.query_one("#curve_names", OptionList), self.query_one("#curve", PlotextPlot)
        if names.highlighted is None:
            return
        name = str(names.get_option_at_index(names.highlighted).id)
        plot.plt.clear_data()
        plot.plt.plot(*drawing.curve(self.follower.rows, name), marker="braille")
        plot.plt.title(name)
        plot.plt.xlabel("step")
        plot.refresh()

    async def _refresh_logs(self) -> None:
        place = self.query_one("#logs", Horizontal)
        for room, lines in self.follower.logs().items():
            shown = Text("\n".join(lines[-self.size.height :]) or "(nothing yet)", no_wrap=True, overflow="ellipsis")
            if found := place.query(f"#log_{room}"):
                found.first(Static).update(shown)
            else:
                log = Static(shown, id=f"log_{room}", classes="log")
                log.border_title = room
                await place.mount(log)

    def _refresh_groups(self) -> None:
        files = recorded_steps(self.follower.root / ROLLOUTS)
        if list(files) == self._steps:
            return
        groups = self.query_one("#groups", OptionList)
        new = [step for step in files if step not in self._steps]
        if len(new) + len(self._steps) > len(files):  # the run has gone back
            groups.clear_options()
            new = list(files)
        self._steps = list(files)
        for step in new:
            titles = [drawing.group_title(group) for group in read_records(files[step])]
            groups.add_options([Option(title, id=f"{step}/{i}") for i, title in enumerate(titles)])
        if groups.highlighted is None and groups.option_count:
            groups.highlighted = 0

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_list.id == "curve_names":
            self._draw()
        else:
            step, _, number = str(event.option_id).partition("/")
            self._group = read_records(recorded_steps(self.follower.root / ROLLOUTS)[int(step)])[int(number)]
            self._show_group()

    def _show_group(self) -> None:
        if self._group:
            self._show("#group_text", drawing.group_text(self._group, self._token_text(), self._per_token))

    def _token_text(self) -> drawing.TokenText | None:
        if self._open_tokenizer is None:
            return None
        if self._tokenizer is None:
            self._tokenizer = self._open_tokenizer()
        decode = self._tokenizer.decode
        return lambda token: str(decode([token]))

    def action_show(self, tab: str) -> None:
        self.query_one(TabbedContent).active = tab
        for names in self.query_one(f"#{tab}").query(OptionList):
            names.focus()  # for the arrow keys

    def action_per_token(self) -> None:
        self._per_token = not self._per_token
        self._show_group()
