"""The resolved configuration: precedence, provenance, presets and refusals."""

import pytest

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.resolve import resolve


@pytest.fixture
def refusal(write):
    """The message with which a recipe text (or overrides, or an environment) is refused."""

    def _refusal(text, overrides=(), environment=None):
        path = write("a.yaml", text)
        with pytest.raises(ConfigError) as error:
            resolve(path, overrides, environment or {})
        assert error.value.exit_code == 2
        assert "\n" not in str(error.value)
        return str(error.value)

    return _refusal


LADDER = [  # from the weakest to the strongest, each with the source it must show
    ("preset", "preset v4-tiny", 128),
    ("family", "family.yaml:2", 130),
    ("variant", "variant.yaml:2", 132),
    ("experiment", "experiment.yaml:2", 134),
    ("environment", "environment UNDERTOW__MODEL__HIDDEN_SIZE", 136),
    ("command line", "command line", 138),
]


@pytest.mark.parametrize("strongest", range(len(LADDER)))
def test_precedence_and_source(write, strongest):
    names = [name for name, _, _ in LADDER[: strongest + 1]]
    value = {name: number for name, _, number in LADDER}

    def field(name):
        return f"model: {{hidden_size: {value[name]}}}\n" if name in names else "\n"

    width = f"  hidden_size: {value['family']}\n" if "family" in names else "\n"
    write("family.yaml", f"model:\n{width}  preset: v4-tiny\n")
    write("variant.yaml", "extends: family.yaml\n" + field("variant"))
    path = write("experiment.yaml", "extends: variant.yaml\n" + field("experiment"))
    environment = {"UNDERTOW__MODEL__HIDDEN_SIZE": str(value["environment"])} if "environment" in names else {}
    overrides = [f"model.hidden_size={value['command line']}"] if "command line" in names else []
    resolved = resolve(path, overrides, environment)
    _, source, number = LADDER[strongest]
    assert (resolved.config.model.hidden_size, resolved.sources["model.hidden_size"]) == (number, source)


def test_variable_of_a_parent_beats_the_child_only_when_set(write):
    write("family.yaml", "model: v4-tiny\ntrain: {steps: '${STEPS:100}'}\n")
    path = write("experiment.yaml", "extends: family.yaml\ntrain: {steps: 50}\n")
    unset, set_ = resolve(path, [], {}), resolve(path, [], {"STEPS": "7"})
    assert (unset.config.train.steps, unset.sources["train.steps"]) == (50, "experiment.yaml:2")
    assert (set_.config.train.steps, set_.sources["train.steps"]) == (7, "environment STEPS (family.yaml:2)")


def test_defaults_and_no_recipe():
    resolved = resolve(None, ["model=v4-debug"], {})
    assert resolved.config.train.steps == 300
    assert resolved.sources["train.steps"] == resolved.sources["ops"] == "default"
    assert resolved.sources["model.preset"] == "command line"
    assert resolved.sources["model.rope_scaling.factor"] == "preset v4-debug"


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro", "v4-proxy", "v4-small", "v4-tiny", "v4-debug"])
def test_preset_is_the_model_of_that_name(name):
    resolved = resolve(None, [f"model={name}"], {})
    assert (resolved.config.model, resolved.preset) == (ModelConfig.from_preset(name), name)


def test_preset_with_single_fields_also_inside_a_section(write):
    path = write("a.yaml", "model:\n  preset: v4-tiny\n  rope_scaling: {factor: 8}\n")
    model = resolve(path, ["model.index_topk=16"], {}).config.model
    assert model == ModelConfig.from_preset(
        "v4-tiny", index_topk=16, rope_scaling={"factor": 8.0, "original_max_position_embeddings": 1024}
    )


def test_other_preset_in_a_child_keeps_the_fields_set_alone(write):
    write("a.yaml", "model: {preset: v4-tiny, index_topk: 16}\n")
    resolved = resolve(write("b.yaml", "extends: a.yaml\nmodel: v4-small\n"), [], {})
    assert resolved.config.model == ModelConfig.from_preset("v4-small", index_topk=16)
    assert resolved.sources["model.index_topk"] == "a.yaml:1"


def test_model_without_preset_needs_its_schedule(write, refusal):
    ratios = "[0, 0, 4, 0]"
    path = write("b.yaml", f"model: {{num_hidden_layers: 3, compress_ratios: {ratios}}}\n")
    resolved = resolve(path, [], {})
    assert (resolved.preset, resolved.config.model.compress_ratios) == (None, (0, 0, 4, 0))
    assert resolved.sources["model.hidden_size"] == "default"
    assert refusal("seed: 1\nmodel:\n  num_hidden_layers: 3\n").startswith(
        "a.yaml:2: 'model.compress_ratios' is required: "
    )


def test_configuration_is_frozen():
    config = resolve(None, ["model=v4-debug"], {}).config
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


MODEL = "model: v4-tiny\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  lerning_rate: 0.1\n",
            "a.yaml:3: unknown key 'train.lerning_rate' (given 0.1); did you mean 'train.learning_rate'? "
            "allowed keys of train: balance_weight, batch_size, ",
        ),
        ("trian:\n  steps: 1\n", "a.yaml:2: unknown key 'trian'; did you mean 'train'? allowed keys of a run: "),
        ("steps: 1\n", "a.yaml:2: unknown key 'steps' (given 1); did you mean 'train.steps'? allowed keys of a run: "),
        ("'[key]': 1\n", "a.yaml:2: unknown key '[key]' (given 1); allowed keys of a run: "),
        ("'': 1\n", "a.yaml:2: unknown key '' (given 1); allowed keys of a run: "),
        ("zzz: x\n", "a.yaml:2: unknown key 'zzz' (given 'x'); allowed keys of a run: attention, data, device, "),
        (
            "optimizations: {fusoin: on}\n",
            "a.yaml:2: unknown key 'optimizations.fusoin' (given 'on'); did you mean 'opt",
        ),
        ("train:\n  steps: many\n", "a.yaml:3: train.steps is 'many'; allowed: a whole number (optimizer steps)"),
        ("train:\n  steps: '5'\n", "a.yaml:3: train.steps is '5'; allowed: a whole number (optimizer steps)"),
        ("train:\n  steps: 3.5\n", "a.yaml:3: train.steps is 3.5; allowed: a whole number (optimizer steps)"),
        ("train:\n  steps: true\n", "a.yaml:3: train.steps is true; allowed: a whole number (optimizer steps)"),
        ("train:\n  steps: null\n", "a.yaml:3: train.steps is null; allowed: a whole number (optimizer steps)"),
        ("train:\n  steps: {a: 1}\n", "a.yaml:3: train.steps is a mapping of keys; allowed: a whole number (optimizer"),
        ("train:\n  steps: 0\n", "a.yaml:3: train.steps is 0; allowed: greater than or equal to 1 (optimizer steps)"),
        ("train:\n  beta2: 1\n", "a.yaml:3: train.beta2 is 1; allowed: less than 1 (AdamW's memory of the "),
        ("train:\n  mtp_weight: .nan\n", "a.yaml:3: train.mtp_weight is NaN; allowed: a finite number ("),
        ("train: 5\n", "a.yaml:2: train is 5; allowed: a mapping of keys"),
        # a value of several kinds: none of their names is told
        (
            "recompute: {layers: [-1]}\n",
            "a.yaml:2: recompute.layers is [-1]; allowed: layers of the trunk whose activations are recomputed: none, "
            "all, or a list of their numbers",
        ),
        ("recompute:\n  layers: 0-3\n", "a.yaml:3: recompute.layers is '0-3'; allowed: layers of the trunk"),
        ("recompute: {modules: {query: [-1]}}\n", "a.yaml:2: recompute.modules.query is [-1]; allowed: single modules"),
        ("train:\n", "a.yaml:2: train is null; allowed: a mapping of keys"),
        ("numerics:\n  dtype: float16\n", "a.yaml:3: numerics.dtype is 'float16'; allowed: 'float32' or 'bfloat16' ("),
        (
            "numerics:\n  batch_invariant: off\n",
            "a.yaml:3: numerics.batch_invariant is 'off'; allowed: true or false (",
        ),
        (
            "ops:\n  linear: tritn\n",
            "a.yaml:3: ops.linear is 'tritn'; allowed: 'auto', 'reference' or 'triton' (",
        ),
        (
            "attention: {backend: flydsl}\n",
            "a.yaml:2: attention.backend is 'flydsl'; allowed: 'auto', 'reference' or 'triton' (",
        ),
        ("ops:\n  a b: auto\n", "a.yaml:3: ops.a b is 'a b'; allowed: a lower-case name ("),
        ("optimizations: {fp8: 1}\n", "a.yaml:2: optimizations.fp8 is 1; allowed: 'on' or 'off' ("),
        ("out: ''\n", "a.yaml:2: out is ''; allowed: text that is not empty (run directory)"),
        ("seed: -1\n", "a.yaml:2: seed is -1; allowed: greater than or equal to 0 (seed of weights and data order)"),
        (
            "train:\n  steps: x\n  beta1: y\n  beta2: z\n",
            "a.yaml:3: train.steps is 'x'; allowed: a whole number (optim",
        ),
        (
            "train:\n  steps: 3\n  learning_rate: 1e-5\n",
            "a.yaml:4: train: min_learning_rate 0.0003 exceeds learning_rate 1e-05",
        ),
        (
            "train:\n  sequence_length: 20000\n",
            "a.yaml:3: train.sequence_length 20000 exceeds model.max_position_embeddings 16384",
        ),
    ],
)
def test_refusals_name_place_key_given_and_allowed(refusal, text, message):
    assert refusal(MODEL + text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: v4-tny\n", "a.yaml:1: model.preset is 'v4-tny'; did you mean 'v4-tiny'?; allowed: v4-flash, v4-pro, "),
        (
            "modle: v4-tiny\n",
            "a.yaml:1: unknown key 'modle' (given 'v4-tiny'); did you mean 'model'? allowed keys of a run",
        ),
        ("model: {preset: [a]}\n", 'a.yaml:1: model.preset is ["a"]; allowed: v4-flash, '),
        ("model: {preset: {a: 1}}\n", "a.yaml:1: model.preset is a mapping of keys; allowed: v4-flash, "),
        ("model: {preset: 3}\n", "a.yaml:1: model.preset is 3; allowed: v4-flash, "),
        ("model: null\n", "a.yaml:1: model is null; allowed: a mapping of keys (a preset by name, or "),
        ("model: 5\n", "a.yaml:1: model is 5; allowed: a mapping of keys (a preset by name, or "),
        ("train: {}\n", "'model' is required: a preset by name, or a mapping of "),
        (
            "model:\n  preset: v4-tiny\n  hiden_size: 4\n",
            "a.yaml:3: unknown key 'model.hiden_size' (given 4); did you mean 'model.hidden_size'? allowed keys of ",
        ),
        (
            "model:\n  preset: v4-tiny\n  rope_scaling: {factr: 4}\n",
            "a.yaml:3: unknown key 'model.rope_scaling.factr' (given 4); did you mean 'model.rope_scaling.factor'? ",
        ),
        (
            "model:\n  preset: v4-tiny\n  hidden_size: true\n",
            "a.yaml:3: model.hidden_size is true; allowed: a whole num",
        ),
        (
            "model:\n  preset: v4-tiny\n  head_dim: '64'\n",
            "a.yaml:3: model.head_dim is '64'; allowed: a whole number (",
        ),
        (
            "model:\n  preset: v4-tiny\n  compress_ratios: [0, 4, x, 4, 0]\n",
            "a.yaml:3: model.compress_ratios.2 is 'x'; allowed: a whole number (",
        ),
        (
            "model:\n  preset: v4-tiny\n  num_hidden_layers: 5\n",
            "a.yaml:3: model: compress_ratios has 5 entries; 6 are needed: num_hidden_layers + num_nextn_",
        ),
    ],
)
def test_refusals_of_models(refusal, text, message):
    assert refusal(text).startswith(message)


def test_more_mistakes_are_counted(refusal):
    assert refusal(MODEL + "train: {steps: x, beta1: y, beta2: z}\n").endswith("; and 2 more mistakes")
    assert refusal(MODEL + "train: {steps: x, beta1: y}\n").endswith("; and 1 more mistake")


def test_refusals_of_values_from_outside_the_file(refusal):
    assert refusal(MODEL, ["train.stepz=3"]).startswith(
        "command line: unknown key 'train.stepz' (given 3); did you mean 'train.steps'? "
    )
    assert (
        refusal(MODEL, ["train.steps=[1"])
        == "command line: train.steps is '[1'; allowed: a whole number (optimizer steps)"
    )
    assert refusal(MODEL, [], {"UNDERTOW__SED": "3"}).startswith(
        "environment UNDERTOW__SED: unknown key 'sed' (given 3)"
    )
    assert refusal(MODEL + "seed: ${S}\n", [], {"S": "x"}).startswith(
        "environment S (a.yaml:2): seed is 'x'; allowed: "
    )


def test_unread_keys_are_refused_with_their_sources(write):
    path = write("a.yaml", "model: v4-tiny\ntrain:\n  steps: 3\n  beta1: 0.8\nops: {linear: reference}\n")
    resolved = resolve(path, ["train.beta2=0.8"], {})
    run = resolved.tracked
    assert (run.train.steps, run.model.hidden_size, resolved.config.train.beta1) == (3, 128, 0.8)
    with pytest.raises(ConfigError) as error:
        resolved.refuse_unread()
    assert str(error.value) == (
        "nothing in this run reads train.beta1 (a.yaml:4), train.beta2 (command line), ops.linear (a.yaml:5); "
        "remove what has no effect here"
    )
    assert (run.train.beta1, run.train.beta2, run.ops) == (0.8, 0.8, {"linear": "reference"})
    resolved.refuse_unread()


def test_a_path_that_is_too_long(refusal):
    said = "a path is at most 1024 bytes, and each name in it at most 255"
    assert refusal("model: v4-debug", ["out=" + "x" * 300]) == f"command line: out: {said}"
    assert refusal("model: v4-debug", [], {"UNDERTOW__OUT": "x/" * 600}) == f"environment UNDERTOW__OUT: out: {said}"


def test_a_refused_value_names_place_and_key(refusal):
    assert refusal("model: v4-debug", ["out=[2020-01-01]"]).startswith("command line: out: a date is not allowed")
    variable = {"UNDERTOW__OUT": "[!!set {a}]"}
    assert refusal("model: v4-debug", [], variable).startswith("environment UNDERTOW__OUT: out: a set is not allowed")
    assert refusal("model: v4-debug", ["seed=0x_"]).startswith("command line: seed is '0x_'; allowed: a whole number")
