"""How YAML is loaded: imported only where some is read."""

from __future__ import annotations

import yaml


class StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases, which unfold to gigabytes, and without keys that stand twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{name}' stands twice; keep one of them", key.start_mark
                )
            seen.add(name)
        values: dict[object, object] = super().construct_mapping(node, deep=deep)
        return values
