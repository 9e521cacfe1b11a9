"""Recurrent PPO on CartPole without velocities: the whole rollout through the LSTM in one call, episodes reset inside.

    pip install gymnasium
    python examples/recurrent_ppo.py             # learns in half a minute on two CPU cores
    python examples/recurrent_ppo.py --compare   # then trains again through a loop over steps, and times both

The agent sees the cart's place and the pole's angle, so it has to remember to know how fast they move.  Episodes end
in the middle of a rollout.  The usual program (CleanRL's ppo_atari_lstm.py) therefore calls its LSTM once for each step
of the rollout, and multiplies the state with 1 - done in between; here `reset=` says where episodes begin.
"""

import argparse
import statistics
import time
from pathlib import Path

import gymnasium
import torch
from torch import Tensor, nn

import whorl
from whorl.bench.figures import Figures, Plot
from whorl.bench.tables import Table, number

GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, NORM, RATE = 0.99, 0.95, 0.2, 0.005, 0.5, 0.5, 2e-3
SCALE = torch.tensor([1 / 2.4, 1 / 0.21])  # of the place and the angle at which an episode ends


class Agent(nn.Module):
    """Logits of the two pushes, and the value, at every step."""

    def __init__(self, units: int, per_step: bool) -> None:
        super().__init__()
        self.per_step = per_step
        self.encoder = nn.Sequential(nn.Linear(2, 64), nn.Tanh())
        self.lstm = (nn.LSTM if per_step else whorl.LSTM)(64, units)
        self.actor, self.critic = nn.Linear(units, 2), nn.Linear(units, 1)
        for name, weight in self.named_parameters():
            small = 0.01 if name == "actor.weight" else 1.0
            nn.init.orthogonal_(weight, small) if weight.dim() > 1 else nn.init.zeros_(weight)

    def forward(self, seen: Tensor, begins: Tensor, state: tuple | None) -> tuple[Tensor, Tensor, tuple]:
        """seen [time, environments, 2]; begins [time, environments], where an episode begins; the state before."""
        x = self.encoder(seen)
        if not self.per_step:
            y, state = self.lstm(x, state, reset=begins)
        else:
            if state is None:
                state = (x.new_zeros(1, x.shape[1], self.lstm.hidden_size),) * 2
            outs = []
            for step, begin in zip(x, begins, strict=True):
                kept = (~begin).float()[None, :, None]
                out, state = self.lstm(step[None], (kept * state[0], kept * state[1]))
                outs.append(out)
            y = torch.cat(outs)
        return self.actor(y), self.critic(y).squeeze(-1), state


class Environments:
    """CartPole many times over; place and angle are all that is seen of it."""

    def __init__(self, count: int, seed: int) -> None:
        self.all = gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")
        self.seen = self._see(self.all.reset(seed=seed)[0])
        self.begins = torch.ones(count, dtype=torch.bool)  # whether what is seen is the first of an episode
        self.over = torch.zeros(
            count, dtype=torch.bool
        )  # or its last, after which no push is made but a new one begins
        self.returns, self.finished = torch.zeros(count), []

    def _see(self, observations) -> Tensor:
        return torch.as_tensor(observations[:, [0, 2]]) * SCALE

    def step(self, push: Tensor) -> tuple[Tensor, Tensor]:
        """The reward of each, and whether it failed."""
        observations, reward, failed, stopped, _ = self.all.step(push.numpy())
        self.seen, self.begins = self._see(observations), self.over
        self.over = torch.as_tensor(failed | stopped)
        reward = torch.as_tensor(reward, dtype=torch.float32)
        self.returns += reward
        self.finished += self.returns[self.over].tolist()
        self.returns[self.over] = 0
        return reward, torch.as_tensor(failed)


@torch.no_grad()
def rollout(agent: Agent, environments: Environments, state: tuple | None, steps: int, device: torch.device) -> tuple:
    """What was seen and done in so many steps of every environment, and the state after them."""
    rows = []
    for _ in range(steps):
        seen, begins, over = environments.seen, environments.begins, environments.over
        logits, value, state = agent(seen[None].to(device), begins[None].to(device), state)
        chances = logits[0].float().log_softmax(-1).cpu()
        push = torch.multinomial(chances.exp(), 1).squeeze(-1)
        chance = chances.gather(-1, push[:, None]).squeeze(-1)
        reward, failed = environments.step(push)
        rows.append((seen, begins, over, push, chance, value[0].float().cpu(), reward, failed, environments.over))
    seen, begins, over, push, chance, value, reward, failed, ended = map(torch.stack, zip(*rows, strict=True))
    last = agent(environments.seen[None].to(device), environments.begins[None].to(device), state)[1].float().cpu()
    after, gain, gains = torch.cat([value[1:], last]), torch.zeros_like(last[0]), []
    # Generalized advantage estimation: an episode that was stopped goes on in its value.  Values lie between 0 and 1.
    for t in reversed(range(steps)):
        delta = (1 - GAMMA) * reward[t] + GAMMA * after[t] * ~failed[t] - value[t]
        gain = delta + GAMMA * LAMBDA * gain * ~ended[t]
        gains.append(gain)
    gain = torch.stack(gains[::-1])
    return tuple(part.to(device) for part in (seen, begins, ~over, push, chance, gain, gain + value)), state


def loss_of(agent: Agent, part: tuple, state: tuple | None) -> Tensor:
    """PPO's loss of some environments' rollout; steps after the end of an episode do not count."""
    seen, begins, counts, push, chance, gain, target = part
    logits, value, _ = agent(seen, begins, state)
    chances = logits.log_softmax(-1)
    ratio = (chances.gather(-1, push[..., None]).squeeze(-1) - chance).exp()
    weight = counts / counts.sum()  # in the place of indexing, for which a GPU would be waited for
    gain = gain - (weight * gain).sum()
    gain = gain / ((weight * gain.square()).sum().sqrt() + 1e-8)
    policy = -(weight * torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP))).sum()
    entropy = -(weight * (chances.exp() * chances).sum(-1)).sum()
    return policy - ENTROPY * entropy + VALUE * (weight * (value - target).square()).sum()


def update(agent: Agent, adam: torch.optim.Adam, batch: tuple, state: tuple | None, given: argparse.Namespace) -> None:
    """PPO's epochs over one rollout; a part is some environments over all steps."""
    for _ in range(given.epochs):
        for part in torch.randperm(given.environments).to(batch[0].device).chunk(given.parts):
            before = None if state is None else tuple(tensor[:, part] for tensor in state)
            with torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
                loss = loss_of(agent, tuple(tensor[:, part] for tensor in batch), before)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), NORM)
            adam.step()


def train(given: argparse.Namespace, per_step: bool, steps: int) -> dict:
    """An agent trained from the seed, with its reward and what the times were."""
    torch.manual_seed(given.seed)
    agent = Agent(given.units, per_step).to(given.device)
    adam = torch.optim.Adam(agent.parameters(), RATE, eps=1e-5, fused=True)
    environments, state = Environments(given.environments, given.seed), None
    rounds = max(1, steps // (given.environments * given.time))
    acting, learning, curve, began = [], [], [], time.perf_counter()
    for index in range(rounds):
        adam.param_groups[0]["lr"] = RATE * (1 - index / rounds)
        start, before = time.perf_counter(), state
        batch, state = rollout(agent, environments, state, given.time, given.device)
        acted = time.perf_counter()
        update(agent, adam, batch, before, given)
        if given.device.type == "cuda":
            torch.cuda.synchronize()
        acting.append(acted - start), learning.append(time.perf_counter() - acted)
        done = (index + 1) * given.environments * given.time
        reward = statistics.fmean(environments.finished[-100:] or [0.0])
        curve.append((done, reward))
        if index % max(1, rounds // 10) == 0 or index == rounds - 1:
            print(f"{done:8,} steps  reward {reward:5.1f}  {done / (time.perf_counter() - began):8,.0f} steps/s")
    size = given.environments * given.time
    return {
        "agent": agent, "curve": curve, "reward": evaluate(agent, given), "seconds": time.perf_counter() - began,
        "acting": size / statistics.median(acting), "learning": size * given.epochs / statistics.median(learning),
        "batch": batch, "state": before, "steps": steps,
    }  # fmt: skip


@torch.no_grad()
def evaluate(agent: Agent, given: argparse.Namespace, episodes: int = 100) -> float:
    """The mean reward of episodes that begin together, always with the likelier push."""
    environments, state, alive = Environments(episodes, given.seed + 1), None, torch.ones(episodes, dtype=torch.bool)
    rewards = torch.zeros(episodes)
    while alive.any():
        seen, begins = environments.seen[None].to(given.device), environments.begins[None].to(given.device)
        logits, _, state = agent(seen, begins, state)
        reward, _ = environments.step(logits[0].argmax(-1).cpu())
        rewards += reward * alive
        alive &= ~environments.over
    return rewards.mean().item()


def difference(ours: Agent, batch: tuple, state: tuple | None, units: int) -> float:
    """By how much the gradients of a loop over steps differ from ours on one rollout: the relative 2-norm, float64."""
    grads = []
    for per_step in (False, True):
        agent = Agent(units, per_step).double().to(batch[0].device)
        agent.load_state_dict(ours.state_dict())
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]
        loss_of(agent, tuple(wide), None if state is None else tuple(tensor.double() for tensor in state)).backward()
        grads.append(torch.cat([weight.grad.flatten() for weight in agent.parameters()]))
    return ((grads[0] - grads[1]).norm() / grads[1].norm()).item()


def show(found: dict[str, dict], wrong: float | None, engine: str, given: argparse.Namespace) -> Figures:
    """The figures: a row for each way through the LSTM."""
    rows = tuple(
        (
            name,
            number(one["learning"]),
            number(one["acting"]),
            f"{one['steps']:,}",
            number(one["seconds"]),
            f"{one['reward']:.1f}",
        )
        for name, one in found.items()
    )
    columns = ("LSTM", "updates: steps/s", "rollouts: steps/s", "steps of training", "seconds", "reward of 500")
    notes = []
    if wrong is not None:
        notes.append(f"Gradients of one rollout, float64: the two differ by {wrong:.1e} (relative 2-norm).")
        ours, loop = (one["learning"] for one in found.values())
        notes.append(f"The whole rollout in one call updates {ours / loop:.1f} times as fast.")
    table = Table("CartPole without velocities", columns, rows, tuple(notes))
    text = (
        f"Recurrent PPO, LSTM({given.units}), {given.environments} environments, rollouts of {given.time} steps, "
        f"{given.epochs} epochs of {given.parts} parts"
        + (", updates under bfloat16 autocast" if given.bf16 else ", float32")
        + ". The reward is the mean of 100 episodes after training, always with the likelier push. The loop calls "
        "torch.nn.LSTM once a step and multiplies its state with 1 - done, as CleanRL does; whorl takes the rollout in "
        f"one call, with reset=. In the update whorl ran {engine}.",
    )
    plot = Plot(
        "Reward of the last 100 episodes", "steps", "reward", {name: tuple(one["curve"]) for name, one in found.items()}
    )
    numbers = {f"{name}, {key}": one[key] for name, one in found.items() for key in ("learning", "acting", "reward")}
    return Figures.now(given.device, "recurrent_ppo", "Recurrent PPO", text, [table], [plot], None, numbers)


def main() -> Figures:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=300_000, help="of all environments together")
    arguments.add_argument("--environments", type=int, default=32)
    arguments.add_argument("--time", type=int, default=128, help="steps of a rollout")
    arguments.add_argument("--units", type=int, default=128)
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--parts", type=int, default=4, help="of an epoch: each has some of the environments")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--bf16", action="store_true", help="updates under bfloat16 autocast")
    arguments.add_argument("--compare", action="store_true", help="train again through a loop over steps")
    arguments.add_argument("--loop-steps", type=int, help="of that loop, where its reward is not wanted (as many)")
    arguments.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    given = arguments.parse_args()
    found = {"whorl, one call": train(given, False, given.steps)}
    (ours,) = found.values()
    part = tuple(tensor[:, : given.environments // given.parts] for tensor in ours["batch"])
    before = (
        None
        if ours["state"] is None
        else tuple(tensor[:, : given.environments // given.parts] for tensor in ours["state"])
    )
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
        explanation = whorl.explain(ours["agent"], part[0], part[1], before)
    print(explanation)
    wrong = None
    if given.compare:
        wrong = difference(ours["agent"], part, before, given.units)
        assert wrong < 1e-9, f"the gradients differ by {wrong}"
        found["torch.nn, a call a step"] = train(given, True, given.loop_steps or given.steps)
    figures = show(found, wrong, explanation.plans[0].engine, given)
    print(figures.tables[0].text())
    if given.figures:
        figures.save(given.figures)
    return figures


if __name__ == "__main__":
    main()
