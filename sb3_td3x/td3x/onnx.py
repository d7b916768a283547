"""Export of an actor as one ONNX graph with all that SB3 does around it, so that acting needs numpy and onnxruntime only."""

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import vec_env
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize, VecTransposeImage, unwrap_vec_normalize
from torch import nn

from sb3_td3x.common import files
from sb3_td3x.common.vec_envs import env_id_of
from sb3_td3x.td3x.policies import copy_of
from sb3_td3x.version import __version__

if TYPE_CHECKING:
    import onnx

OBSERVATION, ACTION = "observation", "action"
TOLERANCE = 1e-3  # difference from `predict` that is no rounding any more, as a share of half the action's range
TRANSPARENT = (vec_env.VecMonitor, vec_env.VecCheckNan, vec_env.VecVideoRecorder)  # they do not change observations

Tensors = dict[str, th.Tensor]


class Normalized(nn.Module):
    """``VecNormalize.normalize_obs``, in float64 as there: with a large mean and a small deviation float32 loses digits."""

    def __init__(self, wrapper: VecNormalize):
        super().__init__()
        statistics = wrapper.obs_rms if isinstance(wrapper.obs_rms, dict) else {OBSERVATION: wrapper.obs_rms}
        self.clip = float(wrapper.clip_obs)
        self.moments = {
            name: (th.as_tensor(moments.mean), th.as_tensor(np.sqrt(moments.var + wrapper.epsilon)))
            for name, moments in statistics.items()
        }

    def forward(self, observations: Tensors) -> Tensors:
        normalized = {
            name: ((observations[name].double() - mean) / deviation).clamp(-self.clip, self.clip).float()
            for name, (mean, deviation) in self.moments.items()
        }
        return {**observations, **normalized}


class ChannelsFirst(nn.Module):
    """``VecTransposeImage``: images of ``(height, width, channels)`` as ``(channels, height, width)``."""

    def __init__(self, wrapper: VecTransposeImage):
        super().__init__()
        self.images = getattr(wrapper, "image_space_keys", [OBSERVATION])

    def forward(self, observations: Tensors) -> Tensors:
        return {name: value.permute(0, 3, 1, 2) if name in self.images else value for name, value in observations.items()}


class Graph(nn.Module):
    """The policy after ``stages``, which turn the raw observations, by input ``names``, into those of the policy."""

    def __init__(self, policy: BasePolicy, stages: Iterable[nn.Module], names: Iterable[str]):
        super().__init__()
        self.policy, self.stages, self.names = policy, nn.Sequential(*stages), tuple(names)
        self.output = ACTION if ACTION not in self.names else f"chosen_{ACTION}"
        bounds: Any = policy.action_space  # a Box, as TD3X requires
        self.low, self.high = th.as_tensor(bounds.low), th.as_tensor(bounds.high)

    def forward(self, *observations: th.Tensor) -> th.Tensor:
        """Actions within the bounds, ``(batch, *action shape)``, for a batch of each input."""
        inputs = self.stages(dict(zip(self.names, observations, strict=True)))
        is_dict = isinstance(self.policy.observation_space, spaces.Dict)
        actions = self.policy._predict(inputs if is_dict else inputs[OBSERVATION]).reshape(-1, *self.low.shape)
        if self.policy.squash_output:
            actions = self.low + 0.5 * (actions + 1.0) * (self.high - self.low)  # SB3's `unscale_action`, on tensors
        return actions.clamp(self.low, self.high)


def export_onnx(model: OffPolicyAlgorithm, path: str | Path, env: VecEnv | None = None) -> None:
    """The body of ``TD3X.export_onnx``."""
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
        raise ValueError(f"an export to ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    wrappers: list[VecNormalize | VecTransposeImage] = []
    space, env = model.observation_space, model.env if env is None else env
    if env is not None:
        env = model._wrap_env(env, monitor_wrapper=False)  # with VecTransposeImage, if it has images
        check_for_correct_spaces(env, model.observation_space, model.action_space)
        wrappers, space = _wrappers(env)
    policy = copy_of(model.policy).cpu()
    stages = [Normalized(wrapper) if isinstance(wrapper, VecNormalize) else ChannelsFirst(wrapper) for wrapper in wrappers]
    batch = _batch(space)
    expected = _predict(policy, wrappers, batch)  # now: the statistics may change while another thread trains
    graph = Graph(policy, stages, batch).eval()
    content = _onnx(graph, batch)
    _require_equal(content, batch, expected, graph)
    content.metadata_props.add(key="algorithm", value=type(model).__name__)
    content.metadata_props.add(key="environment", value="" if env is None else env_id_of(env))
    content.metadata_props.add(key="timesteps", value=str(model.num_timesteps))
    content.metadata_props.add(key="sb3_td3x", value=__version__)
    files.write(Path(path), content.SerializeToString())


def _wrappers(env: VecEnv) -> tuple[list[VecNormalize | VecTransposeImage], spaces.Space]:
    """The wrappers that become part of the graph, innermost first, and the space of the graph's inputs."""
    wrappers: list[VecNormalize | VecTransposeImage] = []
    while isinstance(env, VecEnvWrapper) and isinstance(env, (VecNormalize, VecTransposeImage, *TRANSPARENT)):
        if (isinstance(env, VecNormalize) and env.norm_obs) or (isinstance(env, VecTransposeImage) and not env.skip):
            wrappers.insert(0, env)
        env = env.venv
    if env is None:
        raise ValueError("VecNormalize has no environment (that of a copied model has none): its set_venv gives it one")
    if unwrap_vec_normalize(env) is not None:
        problem = f"{type(env).__name__} is around VecNormalize and cannot be part of the graph"
        raise ValueError(f"{problem}: put VecNormalize outermost, or give export_onnx an env without it and normalize before")
    return wrappers, env.observation_space


def _batch(space: spaces.Space) -> dict[str, np.ndarray]:
    """Three example observations by the names of the graph's inputs, to record and to test it with."""
    random = np.random.default_rng(0)
    batch = {}
    for name, member in (space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}).items():
        if isinstance(member, spaces.Box) and np.issubdtype(member.dtype, np.floating):
            batch[name] = random.normal(size=(3, *member.shape)).clip(member.low, member.high).astype(member.dtype)
        else:
            member = copy.deepcopy(member)  # sampling must not advance the generator of the user's space
            member.seed(0)
            batch[name] = np.stack([member.sample() for _ in range(3)])
    return batch


def _predict(
    policy: BasePolicy, wrappers: Iterable[VecNormalize | VecTransposeImage], batch: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The actions that the graph has to give: what SB3 computes from raw observations."""
    observations: Any = batch if isinstance(policy.observation_space, spaces.Dict) else batch[OBSERVATION]
    for wrapper in wrappers:
        change = wrapper.normalize_obs if isinstance(wrapper, VecNormalize) else wrapper.transpose_observations
        observations = change(observations)
    return policy.predict(observations, deterministic=True)[0]


def _onnx(graph: Graph, batch: Mapping[str, np.ndarray]) -> "onnx.ModelProto":
    examples = tuple(th.as_tensor(values) for values in batch.values())
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own internals
        logger.setLevel(logging.ERROR)  # and notes which optional packages are missing
        try:
            program = th.onnx.export(
                graph, examples, input_names=list(graph.names), output_names=[graph.output], verbose=False,
                dynamo=True,  # the older exporter is to be removed from torch
                dynamic_shapes=(({0: th.export.Dim("batch")},) * len(examples),),
            )  # fmt: skip
        except th.onnx.OnnxExporterError as error:
            reason = error.__cause__ or error
            raise ValueError(f"{type(graph.policy).__name__} cannot be exported to ONNX: {reason}") from error
        finally:
            logger.setLevel(level)
    # torch names inner values by their operation, such as "view", which may be the name of an input too
    for number, node in enumerate(program.model.graph.all_nodes()):  # type: ignore[union-attr]  # None without dynamo
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"{value.name}/{number}"
    content = program.model_proto  # type: ignore[union-attr]
    for part in (*content.graph.node, *content.graph.value_info, *content.graph.input, *content.graph.output):
        del part.metadata_props[:]  # source lines with local paths
    return content


def _require_equal(content: "onnx.ModelProto", batch: Mapping[str, np.ndarray], expected: np.ndarray, graph: Graph) -> None:
    """Refuse a graph with which onnxruntime computes other actions than ``predict``: ``ValueError``."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(content.SerializeToString(), providers=["CPUExecutionProvider"])
        (actions,) = session.run(None, dict(batch))
    except Exception as error:  # onnxruntime's errors have no common class
        raise ValueError(f"onnxruntime cannot run the exported graph: {error}") from error
    scale = (graph.high - graph.low).numpy() / 2
    difference = float((np.abs(actions - expected) / scale).max())
    if not difference <= TOLERANCE:  # true for NaN too
        raise ValueError(f"the exported graph gives other actions than predict, by {difference:.2g} of half the range")
