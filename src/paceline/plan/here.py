"""`--cluster here`: the machine, or machines, of a record, as a cluster.

The link within a node is fitted to all-reduces on one node. The network is fitted to all-reduces over several nodes, minus
their time within nodes: the two levels of `links.py`, as in predictions. With one worker per node there is only the network.
"""

import math

from paceline.errors import RecordError
from paceline.plan.cluster import Cluster, from_fit
from paceline.plan.links import Fit, fit_link, fit_network
from paceline.plan.points import Measured


def make_here(measured: Measured) -> Cluster:
    """The cluster of a record; a RecordError says what to measure if its links are unknown."""
    near = [bucket.bytes for bucket in measured.buckets]
    trees = measured.backend not in ("gloo", "")
    on_node = _workers_per_node(measured)
    intra, inter = None, None
    if on_node is None or on_node > 1:
        intra = _try_fit(measured, near)
        if intra is None:
            raise RecordError(_missing(measured, on_node))
    if on_node is not None:
        try:
            inter = fit_network(measured.links, near, intra, cores=measured.cores)
        except ValueError:
            raise RecordError(
                f"{measured.record} timed no all-reduces between its nodes, which --cluster here needs: measure on"
                f" two nodes (paceline scale {measured.task}{measured.flags} --nodes 2)"
            ) from None
    return from_fit(intra, inter, workers_per_node=on_node, cores=measured.cores, trees=trees)


def _workers_per_node(measured: Measured) -> int | None:
    """Workers per node if several nodes were measured; None if all workers were on one node."""
    apart = [point for point in measured.points if point.nodes > 1]
    if not apart:
        return None
    largest = apart[-1]
    on_node = math.ceil(largest.workers / largest.nodes)
    for point in measured.points:
        if point.nodes != math.ceil(point.workers / on_node):
            raise RecordError(
                f"{measured.record} has {largest.workers} workers on {largest.nodes} nodes, but {point.workers} on"
                f" {point.nodes}: for --cluster here, measure every count with {on_node} per node, up to {on_node} on one node"
            )
    return on_node


def _try_fit(measured: Measured, near: list[float]) -> Fit | None:
    try:
        return fit_link(measured.links, near, cores=measured.cores)
    except ValueError:
        return None


def _missing(measured: Measured, on_node: int | None) -> str:
    command = f"paceline scale {measured.task}{measured.flags}"
    if on_node is None:
        return (
            f"{measured.record} timed no all-reduces, which --cluster here needs: measure with {command} --workers 1,2, or name"
            " a record that has them with --links"
        )
    counts = "2" if on_node == 2 else f"2 or {on_node}"
    return (
        f"{measured.record} has {on_node} workers per node but timed no all-reduces within one, which --cluster here needs:"
        f" also measure {counts} workers on one node into it ({command} --workers 1,{on_node})"
    )
