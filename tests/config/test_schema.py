"""The schema documents itself, and a run needs nothing but a model."""

from pydantic import BaseModel

from undertow.config.schema import OptimizationsConfig, RunConfig, Section


def sections(section: type[BaseModel] = RunConfig):
    yield section
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation)


def test_every_value_has_a_description():
    undescribed = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert undescribed == []


def test_only_the_model_is_required():
    assert [name for section in sections() for name, field in section.model_fields.items() if field.is_required()] == [
        "model"
    ]


def test_switches_take_booleans():
    config = OptimizationsConfig.model_validate({"fp8": True, "layout": False})
    assert (config.fp8, config.layout) == ("on", "off")
