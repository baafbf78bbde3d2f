"""Every name of webshart 0.6.0, with the arguments that its users may give by place or by name."""

from __future__ import annotations

import inspect

import pytest

import shardset.webshart as module
from shardset.webshart import _webshart, cache_wait, optimize

OFFERED = """
    __version__ DatasetDiscovery DiscoveredDataset MetadataExtractor TarDataLoader BucketDataLoader discover_dataset
    discover_paired_dataset PairedDataset PairedTarDataLoader SampleLocation SamplePair LoadedSamplePair BatchOperations
    discover_datasets_batch read_files_batch CacheWaitContext iter_with_cache_wait next_with_cache_wait
    apply_captions_to_metadata write_captions_to_metadata upload_caption_metadata optimize_dataset
"""
"""What ``from webshart import *`` gives."""

MODULES = {
    module: "BatchProcessor main extract_metadata optimize_captions run_optimize_dataset DEFAULT_PAYLOAD_EXTENSIONS "
    "Caption CaptionValue OptionalCaptionValue",
    _webshart: "BatchOperations BucketDataLoader DatasetDiscovery DiscoveredDataset MetadataExtractor ShardReader "
    "TarDataLoader TarFileEntry scale_dimensions",
    cache_wait: "CacheWaitContext ShardCacheMonitor iter_with_cache_wait next_with_cache_wait",
    optimize: "DEFAULT_PAYLOAD_EXTENSIONS STATE_FILENAME STATE_SCHEMA_VERSION OptimizationState optimize_dataset "
    "_require_hub",
}

FUNCTIONS = """
    discover_dataset(source, hf_token=None, subfolder=None, metadata=None)
    discover_paired_dataset(left_source, right_source=None, *, left_subfolder=None, right_subfolder=None, \
left_metadata=None, right_metadata=None, hf_token=None, strict=True, pair_key=None)
    discover_datasets_batch(sources, hf_token=None, subfolders=None)
    read_files_batch(dataset_or_datasets, file_requests)
    apply_captions_to_metadata(metadata, captions_by_sample)
    write_captions_to_metadata(metadata_path, captions_by_sample, output_path=None)
    upload_caption_metadata(metadata_dir, repo_id, *, path_in_repo='', revision='main', hf_token=None, \
commit_message='Add coalesced webshart caption metadata')
    next_with_cache_wait(loader)
    iter_with_cache_wait(loader, start_idx, end_idx)
    extract_metadata(args)
    optimize_captions(args)
    run_optimize_dataset(args)
    main()
    optimize_dataset(source, *, destination=None, push_to_hub=None, source_subfolder='', output_prefix='webshart', \
source_revision='main', target_revision='main', hf_token=None, max_shard_size_bytes=1024**3, \
payload_extensions=EXTENSIONS, include_image_geometry=True, max_shards=None, private=None)
    _webshart.scale_dimensions(width, height, target_pixel_area, target_resolution_multiple=64)

    DatasetDiscovery(hf_token=None, metadata_source=None)
    DatasetDiscovery.discover_local(self, path)
    DatasetDiscovery.discover_huggingface(self, repo_id, subfolder=None)

    DiscoveredDataset.get_shard_info(self, index)
    DiscoveredDataset.get_shard_by_name(self, shard_name)
    DiscoveredDataset.list_files_in_shard(self, shard_index)
    DiscoveredDataset.list_samples_in_shard(self, shard_index)
    DiscoveredDataset.get_shard_file_count(self, shard_index)
    DiscoveredDataset.get_shard_sample_count(self, shard_index)
    DiscoveredDataset.find_file_location(self, file_index)
    DiscoveredDataset.open_shard(self, shard_index)
    DiscoveredDataset.quick_stats(self)
    DiscoveredDataset.get_stats(self)
    DiscoveredDataset.get_detailed_stats(self)
    DiscoveredDataset.print_summary(self, detailed)
    DiscoveredDataset.probe_caption_layout(self, max_shards=None)
    DiscoveredDataset.enable_shard_cache(self, location, cache_limit_gb=25.0, parallel_downloads=4)
    DiscoveredDataset.enable_metadata_cache(self, location, init_shard_count=4)
    DiscoveredDataset.clear_metadata_cache(self)
    DiscoveredDataset.get_cache_stats(self)
    DiscoveredDataset.get_hf_token(self)
    DiscoveredDataset.field_rename(self, old_name, new_name, *, overwrite=False, destination=None)

    _webshart.ShardReader.filenames(self)
    _webshart.ShardReader.sample_filenames(self)
    _webshart.ShardReader.read_file(self, file_index)
    _webshart.ShardReader.read_sample(self, sample_index)
    _webshart.ShardReader.read_sample_json(self, sample_index)

    TarDataLoader(dataset_or_path, load_file_data=True, max_file_size=50_000_000, buffer_size=100, hf_token=None, \
chunk_size_mb=10, batch_size=None)
    TarDataLoader.next_batch(self)
    TarDataLoader.iter_batches(self)
    TarDataLoader.state_dict(self)
    TarDataLoader.load_state_dict(self, state_dict)
    TarDataLoader.from_state_dict(state_dict, dataset_or_path=None)
    TarDataLoader.get_state_summary(self)
    TarDataLoader.reset(self)
    TarDataLoader.skip(self, idx)
    TarDataLoader.shard(self, shard_idx=None, filename=None, cursor_idx=None)
    TarDataLoader.iter_range(self, start, end)
    TarDataLoader.set_ranges(self, ranges)
    TarDataLoader.get_metadata(self, shard_idx)
    TarDataLoader.list_samples_in_shard(self, shard_idx)
    TarDataLoader.list_samples_in_shard_filtered(self, shard_idx, path_include=None, path_exclude=None, \
path_filter_mode='auto')
    TarDataLoader.load_sample(self, shard_idx, sample_idx)
    TarDataLoader.load_caption(self, shard_idx, sample_idx)
    TarDataLoader.load_sample_json(self, shard_idx, sample_idx)
    TarDataLoader.coalesce_caption_metadata(self, destination=None, shard_indices=None)
    TarDataLoader.prepare_shards_ahead(self, num_shards=1)
    TarDataLoader.prepare_next_shard(self)
    TarDataLoader.prepare_shard_by_name(self, filename)
    TarDataLoader.will_block(self)
    TarDataLoader.is_shard_locked(self, shard_name)
    TarDataLoader.get_next_shard_info(self)
    TarDataLoader.get_shard_cache_status(self, filename)
    TarDataLoader.get_lookahead_cache_status(self, lookahead=5)
    TarDataLoader.list_shard_aspect_buckets(self, shard_indices, key='aspect', target_pixel_area=None, \
target_resolution_multiple=64, round_to=2)
    TarDataLoader.list_shard_sample_aspect_buckets(self, shard_indices, key='aspect', target_pixel_area=None, \
target_resolution_multiple=64, round_to=2)
    TarDataLoader.list_shard_sample_aspect_buckets_filtered(self, shard_indices, key='aspect', target_pixel_area=None, \
target_resolution_multiple=64, round_to=2, path_include=None, path_exclude=None, path_filter_mode='auto')
    TarDataLoader.list_all_aspect_buckets(self, key=None, target_pixel_area=None, target_resolution_multiple=64, \
round_to=2)

    BucketDataLoader(dataset_or_path, key='aspect', target_pixel_area=None, target_resolution_multiple=64, round_to=2, \
sampling_strategy='sequential', load_file_data=True, max_file_size=50_000_000, hf_token=None, chunk_size_mb=10, \
lazy_load=True, shard_batch_size=10, batch_size=None)
    BucketDataLoader.next_batch(self)
    BucketDataLoader.iter_batches(self)
    BucketDataLoader.reset(self)
    BucketDataLoader.get_bucket_stats(self)
    BucketDataLoader.get_current_bucket(self)
    BucketDataLoader.skip_to_bucket(self, bucket_key)

    SampleLocation(shard_index, sample_index, filename)
    SamplePair(key, left, right)
    LoadedSamplePair(key, left, right)
    PairedDataset(left, right, *, strict=True, pair_key=None)
    PairedDataset.get_pair(self, index)
    PairedDataset.list_pairs(self, start=0, end=None)
    PairedTarDataLoader(dataset, **loader_kwargs)
    PairedTarDataLoader.load_pair(self, index)
    PairedTarDataLoader.iter_pairs(self, start=0, end=None)

    MetadataExtractor(hf_token=None)
    MetadataExtractor.extract_metadata(self, source, destination, checkpoint_dir=None, max_workers=2, \
shard_range=None, include_image_geometry=False)

    BatchOperations()
    BatchOperations.discover_datasets_batch(self, sources, hf_token=None, subfolders=None)
    BatchOperations.load_metadata_batch(self, dataset, shard_indices)
    BatchOperations.read_files_batch(self, datasets, requests)
    BatchProcessor()
    BatchProcessor.process_dataset(self, source, batch_size=50, max_files=None, callback=None)

    CacheWaitContext(dataloader, lookahead=1, progress_bar=True)
    CacheWaitContext.iterate(self)
    cache_wait.ShardCacheMonitor(dataloader)
    cache_wait.ShardCacheMonitor.wait_for_shard_async(self, filename, update_interval=0.1)
    cache_wait.ShardCacheMonitor.wait_for_next_shard(self, callback=None)
    optimize.OptimizationState(schema_version, status, source, manifest_sha256, output_prefix, max_shard_size_bytes, \
payload_extensions, total_samples, input_layout='loose', next_sample_index=0, next_shard_index=0, \
next_source_archive_index=0, next_source_member_offset=0, captioned_samples=0, uncaptioned_samples=0, bytes_sharded=0)
"""

PROPERTIES = {
    "DiscoveredDataset": "name is_remote num_shards total_files total_size",
    "_webshart.ShardReader": "num_files num_samples",
    "_webshart.TarFileEntry": "path offset size data width height aspect json_path json_data captions caption "
    "json_metadata metadata job_id",
    "TarDataLoader": "num_shards current_shard_index current_shard_filename current_file_index load_file_data "
    "max_file_size buffer_size chunk_size_mb batch_size",
    "BucketDataLoader": "batch_size",
    "PairedDataset": "num_pairs unmatched_left unmatched_right",
}
SETTABLE = {"TarDataLoader": "buffer_size chunk_size_mb batch_size", "BucketDataLoader": "batch_size"}


def find(path):
    found = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_what_an_import_of_everything_gives_is_what_webshart_gives():
    assert sorted(module.__all__) == sorted(OFFERED.split())
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize("where", MODULES, ids=lambda where: where.__name__)
def test_every_other_name_is_in_its_module(where):
    assert [name for name in MODULES[where].split() if getattr(where, name, None) is None] == []


@pytest.mark.parametrize("line", [line.strip() for line in FUNCTIONS.splitlines() if line.strip()])
def test_arguments_can_be_given_as_to_webshart(line):
    path, _, arguments = line.partition("(")
    scope = {"EXTENSIONS": module.DEFAULT_PAYLOAD_EXTENSIONS}
    exec(f"def theirs({arguments}: pass", scope)
    theirs = list(inspect.signature(scope["theirs"]).parameters.values())
    ours = list(inspect.signature(find(path)).parameters.values())
    for number, parameter in enumerate(theirs):
        assert ours[number].name == parameter.name
        assert ours[number].kind == parameter.kind
        if parameter.default is not parameter.empty:
            assert ours[number].default == parameter.default
    # What we take beyond that nobody needs to give.
    more = [parameter for parameter in ours[len(theirs) :] if parameter.kind != parameter.VAR_KEYWORD]
    assert [parameter.name for parameter in more if parameter.default is parameter.empty] == []


@pytest.mark.parametrize(("path", "names"), PROPERTIES.items(), ids=list(PROPERTIES))
def test_every_property_is_there(path, names):
    held = find(path)
    attributes = {name for name in names.split() if hasattr(held, name) or name in getattr(held, "__annotations__", {})}
    assert attributes == set(names.split())


@pytest.mark.parametrize(("path", "names"), SETTABLE.items(), ids=list(SETTABLE))
def test_what_can_be_set_is_settable(path, names):
    assert [name for name in names.split() if getattr(find(path), name).fset is None] == []
