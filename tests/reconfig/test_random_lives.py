"""Random lives of a job: whatever happens, the records stay lawful and the job comes to rest where it should be."""

from __future__ import annotations

from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etc_agent.reconfig.known.records import Failure, FailureKind, Outcome, Phase
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster

NODES = ("a", "b", "c", "d")


class JobLife(RuleBasedStateMachine):
    min_nodes = 1

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(Policy(self.min_nodes, 3, num_slots=2, max_restarts=1000, alike_failures=0))
        for name in NODES[: self.min_nodes]:
            self.cluster.join(name)
        self.cluster.run()
        self.highest = 0

    def is_over(self) -> bool:
        return self.cluster.current.outcome is not Outcome.RUNNING

    @rule(name=st.sampled_from(NODES))
    def a_node_joins(self, name: str) -> None:
        if name not in self.cluster.nodes:
            self.cluster.join(name)

    @precondition(lambda self: len(self.cluster.nodes) > 1)
    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        self.cluster.lose(data.draw(st.sampled_from(sorted(self.cluster.nodes))))

    @precondition(lambda self: len(self.cluster.nodes) > 1)
    @rule(data=st.data(), it_stops=st.booleans(), others_go_on=st.booleans())
    def a_node_is_cut_off_and_comes_back(self, data: st.DataObject, it_stops: bool, others_go_on: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.cluster.nodes)))
        self.cluster.cut_off(name)
        self.cluster.run()
        if it_stops or others_go_on:
            self.cluster.fence(name)
        if others_go_on:
            self.cluster.absent_s[name] = self.cluster.policy.fence_s
            self.cluster.run()
        self.cluster.come_back(name)

    @precondition(lambda self: len(self.cluster.view().usable) > 1)
    @rule(data=st.data())
    def a_node_drains(self, data: st.DataObject) -> None:
        self.cluster.drain(data.draw(st.sampled_from(sorted(self.cluster.nodes))))

    @rule(text=st.sampled_from(["1", "2", "3", "4", "6", "8", "nodes=1", "nodes=2", "PP2TP1DP1", "PP3TP2", "max", "x"]))
    def a_size_is_asked_for(self, text: str) -> None:
        self.cluster.ask(text)

    @rule(slow=st.booleans(), refusing=st.sampled_from(["", "", "no memory"]))
    def workers_change_their_pace(self, slow: bool, refusing: str) -> None:
        self.cluster.is_slow, self.cluster.refusing = slow, refusing

    @precondition(lambda self: any(self.cluster.running()))
    @rule(data=st.data(), kind=st.sampled_from(FailureKind))
    def a_worker_fails(self, data: st.DataObject, kind: FailureKind) -> None:
        name, index = data.draw(st.sampled_from(sorted(self.cluster.running())))
        self.cluster.fail(name, index, Failure(f"{name}/{index}", kind, 1, "it failed"))

    @rule()
    def time_passes(self) -> None:
        self.cluster.run()

    @rule()
    def much_time_passes(self) -> None:
        self.let_much_time_pass()

    def let_much_time_pass(self) -> None:
        """The leader decides once late, and then in time for what follows from that."""
        self.cluster.phase_s = self.cluster.failed_s = 1e9
        self.cluster.lead()
        self.cluster.phase_s = self.cluster.failed_s = 0.0
        self.cluster.run()

    @invariant()
    def numbers_only_grow(self) -> None:
        current = self.cluster.current
        assert current.next_id > max(self.cluster.generations, default=0)
        assert current.committed >= self.highest
        self.highest = current.committed

    @invariant()
    def a_phase_has_a_generation(self) -> None:
        current = self.cluster.current
        assert (current.phase is Phase.IDLE) == (current.proposed == 0)

    @invariant()
    def no_two_ranks_share_a_slot_and_none_is_on_a_node_that_never_was(self) -> None:
        for generation in self.cluster.generations.values():
            assert {slot.node for slot in generation.placement} <= set(NODES)
            assert all(slot.index < 2 for slot in generation.placement)

    def teardown(self) -> None:
        """Left alone with willing workers, every life comes to rest in a lawful state."""
        cluster = self.cluster
        cluster.is_slow, cluster.refusing = False, ""
        cluster.catch_up()
        cluster.run()
        for _ in range(4):
            self.let_much_time_pass()
        committed = cluster.current.committed
        failures = any(ack.failure for (generation, _), ack in cluster.acks.items() if generation == committed)
        if not self.is_over() and not failures:
            assert cluster.current.phase is Phase.IDLE
            assert not set(cluster.committed.nodes) & cluster.view().leaving
            cluster.assert_consistent()


class LifeNearItsMinimum(JobLife):
    """A job that is often too small to train, and is held then."""

    min_nodes = 2

    def teardown(self) -> None:
        super().teardown()
        cluster = self.cluster
        if not self.is_over():
            assert cluster.committed.is_held <= (len(cluster.view().usable) < 2), cluster.current


for life in (JobLife, LifeNearItsMinimum):
    life.TestCase.settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, phases=[HypothesisPhase.generate, HypothesisPhase.reuse]
    )
test_a_random_life_of_a_job_is_lawful = JobLife.TestCase
test_a_random_life_near_the_smallest_number_of_nodes_is_lawful = LifeNearItsMinimum.TestCase
