//! The only module that uses `recvmmsg(2)`, `sendmmsg(2)`, their control messages, and socket
//! options that no crate wraps.

use std::{
    io,
    mem::{self, offset_of},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd, AsRawFd},
    ptr,
};

/// Maximum number of datagrams in one system call.
pub(crate) const BATCH: usize = 64;
/// Buffer space for one datagram, bytes: more than any UDP payload. Pages that are never written
/// cost nothing.
const ROOM: usize = 65_536;
/// Bytes from one datagram's space to the next. It is not a power of two, so that their first cache
/// lines fall into different cache sets.
const STRIDE: usize = ROOM + 3 * 64;
/// Buffer space for the control messages of one datagram, bytes.
const CONTROL: usize = 128;

/// Control message space, aligned as `cmsghdr` wants.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL]);

const EMPTY_CONTROL: Control = Control([0; CONTROL]);

/// `libc` structures whose all-zero form is valid.
///
/// # Safety
/// Every field may be zero.
unsafe trait Zeroed: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementor guarantees that zero is a valid value.
        unsafe { mem::zeroed() }
    }
}

// SAFETY: integers and nullable raw pointers only.
unsafe impl Zeroed for libc::mmsghdr {}
// SAFETY: integers only.
unsafe impl Zeroed for libc::sockaddr_storage {}

/// Buffers for one `recvmmsg(2)`, with headers that are made once. Only the fields that the kernel
/// writes are reset for each call.
pub(crate) struct RecvBatch {
    data: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
    /// Places of the datagrams, as pointers into `data`.
    _iovecs: Vec<libc::iovec>,
    /// Headers that point into the four vectors above, none of which ever grows.
    headers: Vec<libc::mmsghdr>,
    received: usize,
}

// SAFETY: the pointers in it lead to memory that it owns itself.
unsafe impl Send for RecvBatch {}

impl RecvBatch {
    /// Buffers for sockets whose datagrams may have different senders and destinations.
    pub(crate) fn addressed() -> Self {
        Self::new(BATCH)
    }

    /// Buffers for connected sockets: [`Self::from`] and [`Self::original`] return `None`.
    pub(crate) fn connected() -> Self {
        Self::new(0)
    }

    fn new(addressed: usize) -> Self {
        let mut data = vec![0_u8; BATCH * STRIDE];
        let mut names = vec![libc::sockaddr_storage::zeroed(); addressed];
        let mut controls = vec![EMPTY_CONTROL; addressed];
        let mut iovecs: Vec<libc::iovec> = (0..BATCH)
            .map(|at| libc::iovec {
                iov_base: data.as_mut_ptr().wrapping_add(at * STRIDE).cast(),
                iov_len: ROOM,
            })
            .collect();
        let mut headers = vec![libc::mmsghdr::zeroed(); BATCH];
        for (at, header) in headers.iter_mut().enumerate() {
            header.msg_hdr.msg_iov = iovecs.as_mut_ptr().wrapping_add(at);
            header.msg_hdr.msg_iovlen = 1;
            if at < addressed {
                header.msg_hdr.msg_name = names.as_mut_ptr().wrapping_add(at).cast();
                header.msg_hdr.msg_namelen = NAME_LEN;
                header.msg_hdr.msg_control = controls.as_mut_ptr().wrapping_add(at).cast();
                header.msg_hdr.msg_controllen = CONTROL;
            }
        }
        Self {
            data,
            names,
            controls,
            _iovecs: iovecs,
            headers,
            received: 0,
        }
    }

    /// Receives the available datagrams, at most [`BATCH`], without waiting.
    pub(crate) fn recv(&mut self, socket: &impl AsFd) -> io::Result<usize> {
        for header in self.headers.iter_mut().take(self.received) {
            if !header.msg_hdr.msg_name.is_null() {
                header.msg_hdr.msg_namelen = NAME_LEN;
                header.msg_hdr.msg_controllen = CONTROL;
            }
        }
        self.received = 0;
        // SAFETY: every header points at buffers that `self` owns, of the lengths given, which
        // were never moved and which nothing else touches meanwhile.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_fd().as_raw_fd(),
                self.headers.as_mut_ptr(),
                BATCH_LEN,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        self.received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        Ok(self.received)
    }

    /// The first control message of datagram `at` for which `wanted` returns a value.
    fn control<T>(&self, at: usize, wanted: impl Fn(i32, i32, &[u8]) -> Option<T>) -> Option<T> {
        let header = &self.headers.get(at).filter(|_| at < self.controls.len())?;
        // SAFETY: the kernel filled the header, whose control buffer belongs to `self` and is
        // alive; the CMSG macros stay within `msg_controllen`, and the data has the type in its header.
        unsafe {
            let mut cmsg = libc::CMSG_FIRSTHDR(&raw const header.msg_hdr);
            while let Some(head) = cmsg.as_ref() {
                let data = libc::CMSG_DATA(cmsg);
                let len = head
                    .cmsg_len
                    .saturating_sub(data.offset_from_unsigned(cmsg.cast()));
                let found = wanted(
                    head.cmsg_level,
                    head.cmsg_type,
                    std::slice::from_raw_parts(data, len),
                );
                if found.is_some() {
                    return found;
                }
                cmsg = libc::CMSG_NXTHDR(&raw const header.msg_hdr, cmsg);
            }
        }
        None
    }

    /// The bytes of datagram `at`.
    pub(crate) fn bytes(&self, at: usize) -> &[u8] {
        self.data
            .get(at * STRIDE..at * STRIDE + self.len(at))
            .unwrap_or_default()
    }

    /// The bytes of datagram `at`, to change in place.
    pub(crate) fn bytes_mut(&mut self, at: usize) -> &mut [u8] {
        let len = self.len(at);
        self.data
            .get_mut(at * STRIDE..at * STRIDE + len)
            .unwrap_or_default()
    }

    fn len(&self, at: usize) -> usize {
        let header = self.headers.get(at).filter(|_| at < self.received);
        header.map_or(0, |h| usize::try_from(h.msg_len).unwrap_or(0).min(ROOM))
    }

    /// Sender of datagram `at`; `None` on a connected socket.
    pub(crate) fn from(&self, at: usize) -> Option<SocketAddr> {
        let name = self.names.get(at).filter(|_| at < self.received)?;
        address(name)
    }

    /// Destination of datagram `at` before it was redirected.
    pub(crate) fn original(&self, at: usize) -> Option<SocketAddr> {
        self.control(at, |level, kind, data| match (level, kind) {
            (libc::SOL_IP, libc::IP_ORIGDSTADDR) => {
                let ip =
                    Ipv4Addr::from(*field::<4>(data, offset_of!(libc::sockaddr_in, sin_addr))?);
                let port = *field(data, offset_of!(libc::sockaddr_in, sin_port))?;
                Some(SocketAddr::from((ip, u16::from_be_bytes(port))))
            }
            (libc::SOL_IPV6, libc::IPV6_ORIGDSTADDR) => {
                let ip = field::<16>(data, offset_of!(libc::sockaddr_in6, sin6_addr))?;
                let port = *field(data, offset_of!(libc::sockaddr_in6, sin6_port))?;
                let scope = *field(data, offset_of!(libc::sockaddr_in6, sin6_scope_id))?;
                let (port, scope) = (u16::from_be_bytes(port), u32::from_ne_bytes(scope));
                Some(SocketAddrV6::new(Ipv6Addr::from(*ip), port, 0, scope).into())
            }
            _ => None,
        })
    }

    /// The kernel's count of datagrams dropped on the socket so far, if the kernel reported it.
    pub(crate) fn overflow(&self) -> Option<u32> {
        self.control(self.received.checked_sub(1)?, |level, kind, data| {
            let overflow = (level, kind) == (libc::SOL_SOCKET, libc::SO_RXQ_OVFL);
            overflow.then(|| data.first_chunk().map(|raw| u32::from_ne_bytes(*raw)))?
        })
    }
}

/// A datagram to be sent, with its addresses.
#[derive(Clone, Copy)]
pub(crate) struct Datagram<'a> {
    pub(crate) bytes: &'a [u8],
    /// Destination; `None` on a connected socket.
    pub(crate) to: Option<SocketAddr>,
    /// Source address; `None` for the socket's own address.
    pub(crate) source: Option<IpAddr>,
}

/// Buffer for the arguments of `sendmmsg(2)`, so that it is not cleared for each call.
pub(crate) struct SendBatch {
    /// Whether consecutive datagrams of one size are sent as one message (`UDP_SEGMENT`).
    segments: bool,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<Control>,
}

// SAFETY: its pointers are written before each use, and only the kernel follows them.
unsafe impl Send for SendBatch {}

impl SendBatch {
    pub(crate) fn new() -> Self {
        Self::of(false)
    }

    /// Arguments for a connected socket. Consecutive datagrams of one size are passed to the kernel
    /// as one message (`UDP_SEGMENT`, Linux 4.18), which goes through the network stack once for
    /// all of them.
    pub(crate) fn segmenting() -> Self {
        Self::of(true)
    }

    fn of(segments: bool) -> Self {
        let nothing = libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            segments,
            iovecs: vec![nothing; BATCH],
            headers: vec![libc::mmsghdr::zeroed(); BATCH],
            names: vec![libc::sockaddr_storage::zeroed(); BATCH],
            controls: vec![EMPTY_CONTROL; BATCH],
        }
    }

    /// Sends at most [`BATCH`] datagrams in one system call. Returns the number that were sent,
    /// which is smaller if one failed. If the first one failed, returns its error.
    pub(crate) fn send<'a>(
        &mut self,
        socket: &impl AsFd,
        datagrams: impl Iterator<Item = Datagram<'a>> + Clone,
    ) -> io::Result<usize> {
        let first = self.try_send(socket, self.segments, datagrams.clone());
        let Err(error) = &first else {
            return first;
        };
        if self
            .headers
            .first()
            .is_none_or(|h| h.msg_hdr.msg_iovlen <= 1)
        {
            return first;
        }
        let apart = self.try_send(socket, false, datagrams);
        if apart.is_ok() && is_unsupported(error) {
            self.segments = false;
        }
        apart
    }

    fn try_send<'a>(
        &mut self,
        socket: &impl AsFd,
        segments: bool,
        datagrams: impl Iterator<Item = Datagram<'a>>,
    ) -> io::Result<usize> {
        let mut slots = self
            .headers
            .iter_mut()
            .zip(&mut self.names)
            .zip(&mut self.controls);
        let mut open: Option<Message<'_>> = None;
        let mut messages = 0;
        for (iovec, datagram) in self.iovecs.iter_mut().zip(datagrams) {
            iovec.iov_base = datagram.bytes.as_ptr().cast_mut().cast();
            iovec.iov_len = datagram.bytes.len();
            if segments
                && let Some(message) = &mut open
                && message.takes(&datagram)
            {
                message.add();
                continue;
            }
            let Some(((header, name), control)) = slots.next() else {
                break;
            };
            *header = libc::mmsghdr::zeroed();
            header.msg_hdr.msg_iov = ptr::from_mut(iovec);
            header.msg_hdr.msg_iovlen = 1;
            if let Some(to) = datagram.to {
                header.msg_hdr.msg_namelen = put_address(name, to);
                header.msg_hdr.msg_name = ptr::from_mut(name).cast();
            }
            if let Some(source) = datagram.source {
                header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = put_source(control, source);
            }
            messages += 1;
            open = Message::open(header, control, &datagram);
        }
        // SAFETY: the first `messages` headers point at the datagrams' bytes, which the kernel
        // only reads, and at memory that `self` owns; all outlive the call. The iovecs of one
        // message lie side by side.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_fd().as_raw_fd(),
                self.headers.as_mut_ptr(),
                messages,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        let sent = self.headers.iter().take(sent);
        Ok(sent.map(|header| header.msg_hdr.msg_iovlen).sum())
    }
}

/// A message of several datagrams of one size, which the kernel separates again.
struct Message<'a> {
    header: &'a mut libc::mmsghdr,
    control: &'a mut Control,
    size: u16,
}

impl<'a> Message<'a> {
    /// A message that begins with `first`; `None` if no other datagram may follow it.
    fn open(
        header: &'a mut libc::mmsghdr,
        control: &'a mut Control,
        first: &Datagram<'_>,
    ) -> Option<Self> {
        let size = u16::try_from(first.bytes.len()).ok()?;
        let may = first.to.is_none() && first.source.is_none() && (1..=SEGMENT).contains(&size);
        may.then_some(Self {
            header,
            control,
            size,
        })
    }

    fn takes(&self, next: &Datagram<'_>) -> bool {
        next.bytes.len() == usize::from(self.size) && next.to.is_none() && next.source.is_none()
    }

    /// Adds the next datagram. Its iovec lies behind the iovecs of the message.
    fn add(&mut self) {
        if self.header.msg_hdr.msg_iovlen == 1 {
            let size = put_control(self.control, libc::SOL_UDP, libc::UDP_SEGMENT, self.size);
            self.header.msg_hdr.msg_control = self.control.0.as_mut_ptr().cast();
            self.header.msg_hdr.msg_controllen = size;
        }
        self.header.msg_hdr.msg_iovlen += 1;
    }
}

/// Maximum length of a datagram that shares a message, bytes. With its headers, it is smaller than
/// any path MTU that the kernel accepts (`net.ipv4.route.min_pmtu`), so that no datagram must be
/// fragmented.
const SEGMENT: u16 = 512;

/// Whether the error shows that the kernel or the device cannot separate messages.
fn is_unsupported(error: &io::Error) -> bool {
    [libc::EINVAL, libc::EIO, libc::EOPNOTSUPP, libc::EMSGSIZE]
        .map(Some)
        .contains(&error.raw_os_error())
}

#[expect(clippy::cast_possible_truncation, reason = "128 bytes")]
const NAME_LEN: libc::socklen_t = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
#[expect(clippy::cast_possible_truncation, reason = "64")]
const BATCH_LEN: libc::c_uint = BATCH as libc::c_uint;

fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        // SAFETY: `sockaddr_storage` is larger and more aligned than `sockaddr_in`.
        libc::AF_INET => Some(v4(unsafe { &*ptr::from_ref(storage).cast() })),
        // SAFETY: `sockaddr_storage` is larger and more aligned than `sockaddr_in6`.
        libc::AF_INET6 => Some(v6(unsafe { &*ptr::from_ref(storage).cast() })),
        _ => None,
    }
}

fn field<const LEN: usize>(data: &[u8], at: usize) -> Option<&[u8; LEN]> {
    data.get(at..)?.first_chunk()
}

fn v4(raw: &libc::sockaddr_in) -> SocketAddr {
    let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
    SocketAddr::from((ip, u16::from_be(raw.sin_port)))
}

fn v6(raw: &libc::sockaddr_in6) -> SocketAddr {
    let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
    let port = u16::from_be(raw.sin6_port);
    SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into()
}

fn put_address(storage: &mut libc::sockaddr_storage, address: SocketAddr) -> libc::socklen_t {
    match address {
        SocketAddr::V4(address) => put_v4(storage, address),
        SocketAddr::V6(address) => put_v6(storage, address),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "constants and sizes of a few bytes"
)]
fn put_v4(storage: &mut libc::sockaddr_storage, address: SocketAddrV4) -> libc::socklen_t {
    let raw = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(address.ip().octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: `sockaddr_storage` is larger and more aligned than `sockaddr_in`.
    unsafe {
        ptr::from_mut(storage)
            .cast::<libc::sockaddr_in>()
            .write(raw)
    };
    size_of::<libc::sockaddr_in>() as libc::socklen_t
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "constants and sizes of a few bytes"
)]
fn put_v6(storage: &mut libc::sockaddr_storage, address: SocketAddrV6) -> libc::socklen_t {
    let raw = libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: address.port().to_be(),
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr {
            s6_addr: address.ip().octets(),
        },
        sin6_scope_id: address.scope_id(),
    };
    // SAFETY: `sockaddr_storage` is larger and more aligned than `sockaddr_in6`.
    unsafe {
        ptr::from_mut(storage)
            .cast::<libc::sockaddr_in6>()
            .write(raw)
    };
    size_of::<libc::sockaddr_in6>() as libc::socklen_t
}

/// Writes the control message that sets a packet's source. Returns its length.
fn put_source(control: &mut Control, source: IpAddr) -> usize {
    match source {
        IpAddr::V4(ip) => put_control(
            control,
            libc::SOL_IP,
            libc::IP_PKTINFO,
            libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(ip.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            },
        ),
        IpAddr::V6(ip) => put_control(
            control,
            libc::SOL_IPV6,
            libc::IPV6_PKTINFO,
            libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: ip.octets(),
                },
                ipi6_ifindex: 0,
            },
        ),
    }
}

fn put_control<T: Copy>(control: &mut Control, level: i32, kind: i32, value: T) -> usize {
    const { assert!(size_of::<T>() <= CONTROL - 2 * size_of::<libc::cmsghdr>()) };
    #[expect(clippy::cast_possible_truncation, reason = "at most CONTROL")]
    let len = size_of::<T>() as libc::c_uint;
    // SAFETY: the buffer is aligned for `cmsghdr`, and large enough for the head and a `T`
    // (checked above); both macros only compute.
    unsafe {
        let head = control.0.as_mut_ptr().cast::<libc::cmsghdr>();
        (*head).cmsg_level = level;
        (*head).cmsg_type = kind;
        (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
        libc::CMSG_DATA(head).cast::<T>().write_unaligned(value);
        libc::CMSG_SPACE(len) as usize
    }
}

fn set_option(socket: &impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    #[expect(clippy::cast_possible_truncation, reason = "4 bytes")]
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: `value` lives across the call and `len` is its size.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            ptr::from_ref(&value).cast(),
            len,
        )
    };
    if ret == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

pub(super) fn receive_original_destination(socket: &impl AsFd, ipv6: bool) -> io::Result<()> {
    if ipv6 {
        set_option(socket, libc::SOL_IPV6, libc::IPV6_RECVORIGDSTADDR, 1)
    } else {
        set_option(socket, libc::SOL_IP, libc::IP_RECVORIGDSTADDR, 1)
    }
}

pub(super) fn force_receive_buffer(socket: &impl AsFd, bytes: usize) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes)
}

/// Makes the kernel write the checksum of the UDP header in raw IPv6 packets.
pub(super) fn udp_checksum_by_kernel(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::SOL_IPV6, libc::IPV6_CHECKSUM, 6)
}

pub(super) fn count_overflow(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)
}

#[cfg(test)]
mod tests;
