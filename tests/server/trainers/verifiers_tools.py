"""A task of verifiers whose tool is a server in a process: `python -m verifiers_tools` runs it."""
# pyright: reportMissingImports=false

from collections.abc import Iterable

from verifiers.v1 import Task, TaskConfig, TaskData, Taskset, Toolset, ToolsetConfig, tool

__all__ = ["AddingTaskset"]


class Sums(Toolset[ToolsetConfig]):
    TOOL_PREFIX = None

    @tool
    def add(self, a: int, b: int) -> str:
        """Return the sum of two numbers."""
        return f"{a} + {b} = {a + b}"


class Adding(Task[TaskData]):
    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[Toolset]:
        return [Sums(ToolsetConfig())]


class AddingTaskset(Taskset[Adding]):
    def load(self) -> Iterable[Adding]:
        for prompt in ("Add some numbers.", "Add other numbers."):
            yield Adding(TaskData(prompt=prompt), self.config.task)


if __name__ == "__main__":
    Sums.run()
