// s3rver with what S3 does and s3rver does not: whole objects or none, conditions, uploads given up, names in byte
// order, the range bytes=0-0. Usage: node s3.cjs FOLDER
'use strict';

const { AsyncLocalStorage } = require('node:async_hooks');
const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const S3rver = require('s3rver');
const S3Error = require('s3rver/lib/models/error');
const S3Object = require('s3rver/lib/models/object');
const FilesystemStore = require('s3rver/lib/stores/filesystem');

const SUFFIX = '._S3rver_object';
const asked = new AsyncLocalStorage();

class Store extends FilesystemStore {
  /** Checks If-Match and If-None-Match. What is done in one tick after it is done under them. */
  checkConditions(bucket, key, { ifMatch, ifNoneMatch }) {
    let etag;
    try {
      etag = `"${fs.readFileSync(this.getResourcePath(bucket, key, 'object.md5'), 'utf8')}"`;
    } catch (error) {
      if (error.code !== 'ENOENT') throw error;
    }
    if ((ifMatch && ifMatch !== etag) || (ifNoneMatch === '*' && etag)) {
      const failed = new S3Error('PreconditionFailed', 'At least one of the preconditions did not hold');
      failed.status = 412;
      throw failed;
    }
  }

  async getObject(bucket, key, options = {}) {
    const objectPath = this.getResourcePath(bucket, key, 'object');
    let handle;
    try {
      handle = fs.openSync(objectPath);
    } catch (error) {
      if (error.code === 'ENOENT') return null;
      throw error;
    }
    try {
      this.checkConditions(bucket, key, { ifMatch: asked.getStore().ifMatch });
      const { size, mtime } = fs.fstatSync(handle);
      const metadata = {
        ...JSON.parse(fs.readFileSync(this.getResourcePath(bucket, key, 'metadata.json'), 'utf8')),
        etag: `"${fs.readFileSync(`${objectPath}.md5`, 'utf8')}"`,
        'last-modified': mtime.toUTCString(),
        'content-length': size,
      };
      const hasRange = options.start !== undefined || options.end !== undefined;
      const range = { start: options.start || 0, end: Math.min(options.end ?? Infinity, Math.max(0, size - 1)) };
      const isEmpty = range.end < range.start;
      const content = isEmpty ? null : fs.createReadStream(null, { fd: handle, ...range });
      if (content) handle = null; // the stream closes it
      const object = new S3Object(bucket, key, content, metadata);
      if (hasRange) object.range = range;
      return object;
    } finally {
      if (handle !== null) fs.closeSync(handle);
    }
  }

  async putObject(object) {
    const staging = path.join(this.rootDirectory, '.staging', crypto.randomUUID());
    fs.mkdirSync(path.dirname(staging), { recursive: true });
    const md5 = crypto.createHash('md5');
    const file = fs.createWriteStream(staging);
    let size = 0;
    for await (const chunk of Buffer.isBuffer(object.content) ? [object.content] : object.content) {
      const bytes = Buffer.from(chunk, 'binary');
      md5.update(bytes);
      size += bytes.length;
      if (!file.write(bytes)) await new Promise((resolve) => file.once('drain', resolve));
    }
    await new Promise((resolve) => file.end(resolve));
    // From here to the end nothing waits, so that no request sees a part of it.
    this.checkConditions(object.bucket, object.key, asked.getStore());
    const objectPath = this.getResourcePath(object.bucket, object.key, 'object');
    fs.mkdirSync(path.dirname(objectPath), { recursive: true });
    const digest = md5.digest('hex');
    const kept = Object.entries(object.metadata).filter(
      ([name]) => S3Object.ALLOWED_METADATA.includes(name) || name.startsWith('x-amz-meta-'),
    );
    fs.renameSync(staging, objectPath);
    fs.writeFileSync(`${objectPath}.md5`, digest);
    fs.writeFileSync(
      this.getResourcePath(object.bucket, object.key, 'metadata.json'),
      JSON.stringify(Object.fromEntries(kept)),
    );
    return { size, md5: digest };
  }

  uploadPath(bucket, uploadId) {
    return path.join(this.getResourcePath(bucket, undefined, 'uploads'), path.basename(uploadId));
  }

  async putPart(bucket, uploadId, partNumber, content) {
    if (!fs.existsSync(this.uploadPath(bucket, uploadId))) {
      content.resume();
      throw new S3Error('NoSuchUpload', 'The specified upload does not exist');
    }
    return super.putPart(bucket, uploadId, partNumber, content);
  }

  async listObjects(bucket, { delimiter = '', startAfter = '', prefix = '', maxKeys = Infinity }) {
    const root = this.getBucketPath(bucket);
    const keys = fs
      .readdirSync(root, { recursive: true, encoding: 'utf8' })
      .filter((name) => name.endsWith(SUFFIX) && !name.startsWith('._S3rver_uploads'))
      .map((name) => name.slice(0, -SUFFIX.length))
      .filter((key) => key.startsWith(prefix) && Buffer.compare(Buffer.from(key), Buffer.from(startAfter)) > 0)
      .sort((one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
    const folders = new Set();
    const found = keys.filter((key) => {
      const at = delimiter ? key.indexOf(delimiter, prefix.length) : -1;
      if (at >= 0) folders.add(key.slice(0, at + 1));
      return at < 0;
    });
    const objects = [];
    for (const key of found.slice(0, maxKeys)) {
      objects.push(new S3Object(bucket, key, null, await this.getMetadata(bucket, key)));
    }
    return { objects, commonPrefixes: [...folders].sort(), isTruncated: found.length > maxKeys };
  }
}

// Today's OpenSSL has no DES, with which s3rver hides the last name of a page in the token for the next one.
for (const name of ['createCipheriv', 'createDecipheriv']) {
  const make = crypto[name];
  crypto[name] = (_, key, iv) => make('aes-128-cbc', Buffer.concat([key, key]), Buffer.concat([iv, iv]));
}

const folder = process.argv[2];
const server = new S3rver({ directory: folder, address: '127.0.0.1', port: 0, silent: true });
server.store = server.context.store = new Store(folder);
server.middleware.unshift((ctx, next) => {
  if (ctx.method !== 'DELETE' || !ctx.query.uploadId) return next();
  fs.rmSync(server.store.uploadPath(ctx.path.split('/')[1], ctx.query.uploadId), { recursive: true, force: true });
  ctx.status = 204;
});
server.middleware.unshift((ctx, next) =>
  asked.run({ ifMatch: ctx.headers['if-match'], ifNoneMatch: ctx.headers['if-none-match'] }, next),
);
server.run().then(({ port }) => console.log(`listening on ${port}`));
