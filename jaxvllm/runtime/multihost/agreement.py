"""Checks that all processes of an engine agree. If one of them does not, all of them raise; none of them hangs."""

import json
from collections.abc import Mapping
from typing import Any

from sharding.hosts import Hosts


def agree(hosts: Hosts, facts: Mapping[str, Any], offer: str = "") -> str:
    """Returns process 0's `offer` when the `facts` of all processes are equal. Otherwise all raise ValueError."""
    mine = {name: repr(value) for name, value in facts.items()}
    told = [json.loads(text) for text in hosts.share(json.dumps([mine, offer]))]
    first, its_offer = told[0]
    for index, (facts_there, _) in enumerate(told):
        for name in sorted(first.keys() | facts_there.keys()):
            here, there = first.get(name, "missing"), facts_there.get(name, "missing")
            if here != there:
                raise ValueError(
                    f"{name} is {here} in process 0 and {there} in process {index}: start all processes with the same "
                    "options and versions"
                )
    return str(its_offer)


def all_well(hosts: Hosts, trouble: str = "") -> None:
    """Returns when no process has `trouble`. Otherwise all of them raise ConnectionError with the first trouble."""
    for told in hosts.share(trouble):
        if told:
            raise ConnectionError(told)
