"""What an engine has done since it was made; nothing in it ever goes down. No torch."""

from collections import Counter
from dataclasses import dataclass, field

from dualflow.engine.outputs import FinishEvent
from dualflow.engine.step_plan import StepPlan, StepResult


@dataclass(eq=False)
class Counts:
    """``EngineStats`` says what each of them counts."""

    steps: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0
    aux_positions: int = 0
    drafted: int = 0
    accepted: int = 0

    def add_step(self, plan: StepPlan, result: StepResult) -> None:
        """Count one model step."""
        self.steps[result.execution] += 1
        self.computed_tokens += plan.num_tokens
        for sequence in result.sequences:
            self.aux_positions += sequence.aux_positions
            self.drafted += sequence.drafted
            self.accepted += sequence.accepted

    def add_finished(self, event: FinishEvent) -> None:
        """Count one output that has ended."""
        self.finished[event.reason] += 1
        self.prompt_tokens += event.usage.prompt_tokens
        self.cached_tokens += event.usage.cached_tokens
